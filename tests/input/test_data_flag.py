"""`--data` as a name or a path, and what a `config.json` says of its data."""

import shutil

import pytest

import small_sets
from cifar10.config.config import Config
from cifar10.config.data_flag import FILES
from cifar10.errors import UsageError
from cifar10.input import cifar, datasets, records
from recorded_runs import recorded
from small_folders import numbered, write


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current directory, with a folder and files."""
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "cifar10"):
        (tmp_path / folder).mkdir()
    for file in (*(f"set{suffix}" for suffix in FILES), "one.png"):
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("data", "kind", "name"),
    [
        ("photos", "folder", "photos"),
        ("./cifar10", "folder", "cifar10"),
        *((f"set{suffix}", suffix[1:], f"set{suffix}") for suffix in FILES),
        ("cifar10", "cifar10", None),
    ],
)
def test_a_path_becomes_its_kind_and_its_place(place, data, kind, name):
    config = Config(data=data)
    assert config.dataset.data == kind
    assert config.dataset.data_dir == (str(place / name) if name else None)
    is_own = data not in ("cifar10", "auto")
    assert config.run.recipe == ("pictures" if is_own else "tutorial")
    assert (config.update.clip_norm is not None) == is_own


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"data": "phots"}, "phots"),
        ({"data": "tfds:mnist"}, "tfds:mnist"),
        ({"data": "one.png"}, "npz"),
        ({"data": "photos", "data_dir": "/data"}, "data_dir"),
        ({"data": "set.npz", "image_size": 64}, "image_size"),
        ({"data": "photos", "image_size": 4}, "8"),
        ({"validation_fraction": 0.2}, "--val_fraction 0.2"),
        ({"data": "set.npz", "validation_fraction": 0.2}, "validation_fraction"),
        ({"data": "cifar10", "max_bad_images": 0.5}, "max_bad_images has no effect"),
        ({"max_bad_images": 0.5}, "max_bad_images has no effect with --data auto"),
        ({"data": "synthetic", "data_url": "http://a/"}, "data_url has no effect"),
        ({"data": "photos", "data_url": "http://a/"}, "data_url has no effect"),
        ({"data_dir": "/data", "data_url": "http://a/"}, "with --data_dir /data"),
    ],
)
@pytest.mark.usefixtures("place")
def test_unusable_data_is_refused(given, named):
    with pytest.raises(UsageError, match=named):
        Config(**given)


@pytest.mark.parametrize(
    "line", ["image_size = 64", "max_bad_images = 0.5", "validation_fraction = 0.2"]
)
@pytest.mark.usefixtures("place")
def test_a_recipes_settings_of_folders_are_refused_for_other_data(tmp_path, line):
    recipe = tmp_path / "own.toml"
    recipe.write_text(f"{line}\n")
    for data in ("cifar10", "set.npz"):
        with pytest.raises(UsageError, match=f"--{line.split()[0]} has no effect"):
            Config(recipe=str(recipe), data=data)
    Config(recipe=str(recipe), data="photos")


OWN = {"data": "folder", "class_names": ["a", "b"], "classes": 2}


def test_a_run_describes_its_images_and_classes():
    described = datasets.describe(recorded(**OWN, image_shape=[64, 48, 1]))
    assert described == ((64, 48, 1), ("a", "b"))
    shape, names = datasets.describe(recorded(data="cifar100"))
    assert (shape, len(names), len({*names})) == ((32, 32, 3), 100, 100)


def test_data_with_other_classes_is_not_taken_for_the_runs(monkeypatch, stand_in_dir):
    stand_in = datasets.find("synthetic", str(stand_in_dir))
    monkeypatch.setattr(datasets, "find_for", lambda *_, **__: stand_in)
    settings = {**OWN, "image_shape": [32, 32, 3], "data_dir": str(stand_in_dir)}
    with pytest.raises(UsageError, match="10 classes"):
        datasets.find_again(recorded(**settings))
    # Nor of as many, wherever they are named: each would be taken for another.
    settings |= {"class_names": [*"abcdefghij"], "classes": 10}
    for find in (
        datasets.find_again,
        lambda run: datasets.fitted(stand_in, run, "data"),
    ):
        with pytest.raises(UsageError, match="class 0 is"):
            find(recorded(**settings))


def test_a_run_is_scored_on_the_present_pictures_after_a_change(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    photos = write(tmp_path / "photos", *numbered(10, "cat", "dog"))
    wanted = Config(data=str(photos), image_size=8)
    then = datasets.find_for(wanted.dataset)
    assert (tmp_path / "cache" / "cifar10").is_dir(), "the pictures are decoded there"
    described = {
        "class_names": [*then.class_names],
        "image_shape": [8, 8, 3],
        "data_description": then.description,
        "data_fingerprint": then.fingerprint,
        "data_division": then.division,
    }
    run = recorded(**wanted.values, **described)
    assert datasets.find_again(run).description == then.description
    assert "changed" not in capsys.readouterr().err
    (photos / "cat/9.png").unlink()
    now = datasets.find_again(run).description
    assert now.startswith("19 pictures")
    assert "the pictures have changed" in capsys.readouterr().err


def test_another_cifar_copy_is_accepted_only_after_the_recorded_copy_is_gone(
    tmp_path, monkeypatch
):
    small = small_sets.SMALL["cifar10"]
    monkeypatch.setitem(cifar.FORMATS, "cifar10", small)
    monkeypatch.setattr(records, "CIFAR10", small)
    monkeypatch.chdir(tmp_path)
    for folder in ("own", "other"):
        small_sets.write_files(tmp_path / folder, "cifar10")
    run = recorded(data="cifar10", data_dir=str(tmp_path / "own"))

    def counts(data_dir=None):
        return datasets.is_of_run(datasets.find_again(run, data_dir), run)

    assert counts()
    assert counts("other/../own")
    assert not counts("other")
    shutil.rmtree("own")
    assert counts("other"), "it has been moved"
