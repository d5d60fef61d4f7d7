"""Corrections of labels: what a file leaves out and moves, and what is refused."""

import json

import numpy as np
import pytest

import runs
import small_sets
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import cifar, datasets, records
from cifar10.input.pictures import shards
from cifar10.input.regrouping import corrected, names_of, with_val
from cifar10.interface.data import as_dataset
from small_folders import everything, find, numbered, pixels, write

NAMES = numbered(6, "train/cat", "train/dog") + numbered(2, "test/cat", "test/dog")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    return write(tmp_path / "photos", *NAMES)


def listed(tmp_path, *rows, head="picture,class"):
    """Returns the name of a file with these lines."""
    file = tmp_path / "corrections.csv"
    file.write_text("\n".join((head, *rows)) + "\n")
    return str(file)


ROWS = ("train/cat/1.png,dog", "train/dog/0.png,", "train/dog/5.png,dog")


@pytest.mark.parametrize("in_memory", [True, False])
def test_pictures_are_left_out_and_moved(tmp_path, photos, monkeypatch, in_memory):
    plain = find(photos, tmp_path / "cache")
    before, _ = everything(plain)
    if not in_memory:
        monkeypatch.setattr(shards, "IN_MEMORY_BYTES", 0)
    found = corrected(plain, listed(tmp_path, *ROWS))
    (images, labels), (tests, test_labels) = map(found.read, ("train", "test"))
    of_pictures = dict(zip(found.paths["train"], labels.tolist(), strict=True))
    assert of_pictures.pop("train/cat/1.png") == 1
    assert "train/dog/0.png" not in of_pictures
    assert len(of_pictures) == len(labels) - 1 == len(images) - 1 == 10
    assert all(label == ("dog" in path) for path, label in of_pictures.items())
    for path, image in zip(found.paths["train"], images[:], strict=True):
        np.testing.assert_array_equal(image, before[path])
    np.testing.assert_array_equal(tests[:], plain.read("test")[0][:])
    np.testing.assert_array_equal(test_labels, plain.read("test")[1])


def test_leaving_a_picture_out_equals_deleting_it(tmp_path, photos):
    plain = find(photos, tmp_path / "cache")
    found = corrected(plain, listed(tmp_path, "train/dog/2.png,")).read("train")
    (photos / "train/dog/2.png").unlink()
    fewer = find(photos, tmp_path / "cache").read("train")
    for one, other in zip(found, fewer, strict=True):
        np.testing.assert_array_equal(one, other)


def test_corrections_keep_the_division_into_parts(tmp_path):
    plain = find(write(tmp_path / "a", *numbered(8, "b", "c")), tmp_path / "cache")
    rows = (f"{path}," for path in plain.paths["train"][1:-1])
    found = corrected(plain, listed(tmp_path, *rows))
    assert found.paths["test"] == plain.paths["test"]
    assert found.division == plain.division


def test_cifar_and_arrays_are_corrected_by_number(tmp_path, monkeypatch):
    small = small_sets.SMALL["cifar10"]
    monkeypatch.setitem(cifar.FORMATS, "cifar10", small)
    monkeypatch.setattr(records, "CIFAR10", small)
    small_sets.write_files(tmp_path / "binary", "cifar10")
    wanted = Config(data="cifar10", data_dir=str(tmp_path / "binary"))
    plain = datasets.find_for(wanted.dataset)
    file = listed(tmp_path, "train picture 0,", "train picture 7,ship")
    found = datasets.find_for(wanted.replace(corrections=file).dataset)
    before, (images, labels) = plain.read("train"), found.read("train")
    np.testing.assert_array_equal(images, before[0][1:])
    assert labels[6] == small.class_names.index("ship")
    assert found.fingerprint
    assert plain.fingerprint is None
    x = np.stack([pixels(n) for n in range(6)])
    arrays = as_dataset(((x, np.arange(6) % 2), (x[:2], np.arange(2))))
    moved = corrected(arrays, listed(tmp_path, "train picture 2,class 1"))
    assert moved.read("train")[1].tolist() == [0, 1, 1, 1, 0, 1]


def test_pictures_keep_their_numbers_with_a_held_out_val_split(tmp_path):
    x = np.stack([pixels(n) for n in range(20)])
    dataset = with_val(as_dataset(((x, np.arange(20) % 2), (x[:2], np.arange(2)))), 0.2)
    names = {}
    for part in ("train", "val"):
        images, _ = dataset.read(part)
        for name, image in zip(
            names_of(dataset, part, len(images)), images, strict=True
        ):
            number = int(name.removeprefix("train picture "))
            np.testing.assert_array_equal(image, x[number])
            names[number] = part
    last = max(number for number in names if names[number] == "train")
    assert last > 15, "a place in the part would be lower"
    moved = corrected(dataset, listed(tmp_path, f"train picture {last},"))
    left = [bytes(image) for image in moved.read("train")[0]]
    assert len(left) == 15
    assert bytes(x[last]) not in left
    held_out = next(number for number in names if names[number] == "val")
    with pytest.raises(UsageError, match="not a training picture"):
        corrected(dataset, listed(tmp_path, f"train picture {held_out},"))


def test_the_fingerprint_depends_on_the_corrections_and_not_on_the_file(
    tmp_path, photos
):
    plain = find(photos, tmp_path / "cache")

    def fingerprint(*rows, **how):
        return corrected(plain, listed(tmp_path, *rows, **how)).fingerprint

    assert fingerprint("train/cat/0.png,cat") == fingerprint()
    left_out, moved = fingerprint(ROWS[1]), fingerprint("train/dog/0.png,cat")
    assert len({plain.fingerprint, left_out, moved}) == 3
    # What a spreadsheet makes of the file.
    again = fingerprint("x,train/dog/0.png,cat", head="\ufeffnote,picture,class")
    assert again == moved


def test_names_are_found_in_both_forms_of_an_accent(tmp_path):
    names = [*numbered(3, "café", "dog"), "dog/ä, \u3000.png"]
    photos = write(tmp_path / "photos", *(f"train/{name}" for name in names))
    write(photos, "test/caf\xe9/0.png", "test/dog/0.png")
    plain = find(photos, tmp_path / "cache")
    rows = ("train/caf\xe9/0.png,dog", '"train/dog/a\u0308, \u3000.png",cafe\u0301')
    _, labels = corrected(plain, listed(tmp_path, *rows)).read("train")
    assert labels.tolist() == [1, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_file_saved_by_a_spreadsheet_is_read(tmp_path, photos, mark):
    plain = find(photos, tmp_path / "cache")
    rows = [row.replace(",", mark) for row in (",,,", *ROWS, ",,,", ",,")]
    file = listed(tmp_path, *rows, head=f"\ufeffpicture{mark}class{mark}label")
    expected = corrected(plain, listed(tmp_path, *ROWS)).fingerprint
    file = listed(tmp_path, *rows, head=f"\ufeffpicture{mark}class{mark}label")
    assert corrected(plain, file).fingerprint == expected


def test_the_first_line_of_a_file_decides_what_separates_its_columns(tmp_path):
    """Commas in the names of pictures do not."""
    names = [*numbered(3, "cat", "dog"), "cat/a, b, c, d.png"]
    photos = write(tmp_path / "photos", *(f"train/{name}" for name in names))
    write(photos, "test/cat/0.png", "test/dog/0.png")
    plain = find(photos, tmp_path / "cache")
    file = listed(tmp_path, "train/cat/a, b, c, d.png;dog", head="picture;class")
    assert sorted(corrected(plain, file).read("train")[1]) == [0] * 3 + [1] * 4


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["train/cat/9.png,dog"], "line 2: train/cat/9.png"),
        ([",,", "train/cat/0.png,dog", ",dog"], "line 4"),
        (["test/cat/0.png,"], "test/cat/0.png"),
        (["train/cat/0.png,dgo"], "dgo"),
        (["train/cat/0.png,dog,dog"], "train/cat/0.png"),
        ([f"train/cat/{n}.png,dog" for n in range(6)], "cat"),
        (['"train/cat/0.png,dog'], "corrections.csv"),
        (['"train/cat/0".png,dog,'], "cannot be read"),
        (["train/cat/0.png,dog", "train/cat/0.png,"], "line 3.* line 2"),
        (["train/cat/0.png,dog", "train/cat/0.png"], "line 3"),
        (["train/cat/0.png,,cat,dog"], "line 2"),
    ],
)
def test_mistakes_are_refused(tmp_path, photos, rows, named):
    plain = find(photos, tmp_path / "cache")
    with pytest.raises(UsageError, match=named):
        corrected(plain, listed(tmp_path, *rows, head="picture,class,label"))


def test_a_duplicate_column_is_refused(tmp_path, photos):
    file = listed(tmp_path, "train/cat/0.png,dog,cat", head="picture,class,class")
    with pytest.raises(UsageError, match="1 picture and 1 class"):
        corrected(find(photos, tmp_path / "cache"), file)


def test_files_other_than_corrections_are_refused(tmp_path, photos):
    plain = find(photos, tmp_path / "cache")
    for file in (photos, tmp_path / "missing", listed(tmp_path, head="a,b")):
        with pytest.raises(UsageError, match="--corrections") as refused:
            corrected(plain, str(file))
    assert "it needs 1 picture and 1 class column.\nThe file must be CSV" in str(
        refused.value
    )


def test_a_run_resumes_only_with_its_own_corrections(tmp_path, photos):
    file = listed(tmp_path, *ROWS)
    flags = {"data": photos, "image_size": 8, "distortions": "none", "batch_size": 4}
    flags |= {"model": runs.SMALL, "train_dir": tmp_path / "run", "max_steps": 1}

    def train(**more):
        return runs.call("train.py", *runs.flags(**flags, **more))

    done = train(corrections=file)
    assert done.returncode == 0, done.stderr
    assert "11 training images" in done.stdout
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["corrections"] == file
    resume = ("--resume", tmp_path / "run", "--max_steps")
    assert runs.call("train.py", *resume, 2).returncode == 0
    score = ("eval.py", "--run_once", "--train_dir", tmp_path / "run", "--json")
    trained_on = (*score, "--eval_data", "train_eval")
    assert json.loads(runs.call(*trained_on).stdout)["num_examples"] == 11
    # Without the file, or with another, it is not the same data; the test part is.
    plain = train()
    listed(tmp_path, ROWS[0])
    edited, scored = runs.call("train.py", *resume, 3), [runs.call(*score)]
    (tmp_path / "corrections.csv").unlink()
    lost = runs.call("train.py", *resume, 3)
    scored.append(runs.call(*score))
    for refused in (plain, edited, lost):
        assert refused.returncode == 2
        assert file in refused.stderr
    for done in scored:
        assert json.loads(done.stdout)["num_examples"] == 4
        assert f"or their corrections in {file}, have changed" in done.stderr


def test_a_run_with_corrected_weights_says_that_it_has_no_corrections(
    tmp_path, photos, capsys
):
    import cifar10

    given = {"data": str(photos), "model": runs.SMALL, "batch_size": 4, "max_steps": 1}
    given |= {"image_size": 8, "distortions": "none"}
    fixes = listed(tmp_path, "train/cat/0.png,")
    cifar10.train(
        cifar10.Config(**given, corrections=fixes, train_dir=tmp_path / "first")
    )
    again = {**given, "initial_weights": str(tmp_path / "first")}
    for name, more in (("without", {}), ("with", {"corrections": fixes})):
        capsys.readouterr()
        cifar10.train(cifar10.Config(**again, **more, train_dir=tmp_path / name))
        said = " ".join(capsys.readouterr().out.split())
        assert (f"--corrections {fixes}; this run has none" in said) is not more


def test_a_program_corrects_its_arrays(tmp_path):
    import cifar10

    images = np.stack([pixels(n, 24) for n in range(12)])
    config = cifar10.Config(
        data=((images, np.arange(12) % 2), (images, np.arange(12) % 2)),
        corrections=listed(tmp_path, "train picture 3,", "train picture 4,class 1"),
        model=runs.SMALL,
        batch_size=4,
        max_steps=1,
        train_dir=tmp_path / "run",
    )
    record = cifar10.train(config)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "leaves out 1 and moves 1" in settings["data_description"]
    corrected = np.arange(12) % 2
    corrected[4] = 1
    rest = np.arange(12) != 3
    found = cifar10.evaluate(record, split="train")
    expected = cifar10.evaluate(record, data=(images[rest], corrected[rest]))
    assert found["cross_entropy"] == pytest.approx(expected["cross_entropy"])


def test_val_is_unchanged_when_a_training_picture_is_left_out(tmp_path):
    """Else pictures that a run was trained on would be held out of another one."""
    x = np.stack([pixels(n) for n in range(40)])
    given = as_dataset(((x, np.arange(40) % 2), (x[:2], np.arange(2))))
    wanted = Config(val_fraction=0.25)
    plain = datasets.find_for(wanted.dataset, given)
    file = listed(tmp_path, f"{plain.paths['train'][1]},")
    found = datasets.find_for(wanted.replace(corrections=file).dataset, given)
    assert found.paths["val"] == plain.paths["val"]
    for one, other in zip(found.read("val"), plain.read("val"), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(found.read("train")[1]) == len(plain.read("train")[1]) - 1
