"""`--data` as a name or a path, and what a `config.json` says of its data."""

import re

import pytest

from cifar10.config import data_flag, flags
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import datasets


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current directory, with a folder and files."""
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "cifar10", "with space"):
        (tmp_path / folder).mkdir()
    for file in ("set.npz", "one.png"):
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("data", "kind", "name"),
    [
        ("photos", "folder", "photos"),
        ("with space/", "folder", "with space"),
        ("./cifar10", "folder", "cifar10"),
        ("set.npz", "npz", "set.npz"),
        ("cifar10", "cifar10", None),
        ("auto", "auto", None),
        ("tfds:mnist", "tfds:mnist", None),
    ],
)
def test_a_path_becomes_its_kind_and_its_place(place, data, kind, name):
    config = flags.with_recipe({"data": data})
    assert config.data == kind
    assert config.data_dir == (str(place / name) if name else None)
    is_own = data not in ("cifar10", "auto")
    assert config.recipe == ("pictures" if is_own else "tutorial")
    assert (config.clip_norm is not None) == is_own


@pytest.mark.usefixtures("place")
def test_a_models_recipe_comes_before_that_of_the_data():
    config = flags.with_recipe({"data": "photos", "model": "resnet"})
    assert (config.recipe, config.data) == ("resnet", "folder")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": "phots"}, "no such data set, file or folder"),
        ({"data": "one.png"}, "not an .npz"),
        ({"data": "photos", "data_dir": "/data"}, "both name a place"),
        ({"data": "tfds:"}, "name the data set"),
        ({"data": "photos\0"}, "no such data set|cannot be read|unprintable"),
        ({"data": "cifar10", "image_size": 64}, "32 x 32"),
        ({"image_size": 64}, "32 x 32"),
        ({"data": "set.npz", "image_size": 64}, "one size already"),
        ({"data": "photos", "image_size": 4}, "the minimum is 8"),
    ],
)
@pytest.mark.usefixtures("place")
def test_what_is_no_data_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        flags.with_recipe(given)


def test_a_configuration_in_python_may_not_name_a_path():
    with pytest.raises(UsageError, match="it is one of"):
        Config(data="/photos")


OWN = {"data": "folder", "class_names": ["a", "b"], "classes": 2}


def test_a_run_says_what_its_images_and_classes_are():
    described = datasets.describe({**OWN, "image_shape": [64, 48, 1]})
    assert described == ((64, 48, 1), 2, ("a", "b"))
    assert datasets.describe({"data": "cifar100"}) == ((32, 32, 3), 100, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": "imagenet"}, "this version knows"),
        ({"image_shape": None}, "lacks"),
        ({"image_shape": [64, 64]}, "lacks"),
        ({"image_shape": [0, 64, 3]}, "lacks"),
        ({"image_shape": [10**9, 64, 3]}, "lacks"),
        ({"image_shape": [64, 64, 4]}, "lacks"),
        ({"class_names": []}, "lacks"),
        ({"classes": 3}, "names 2 classes"),
    ],
)
def test_what_cannot_be_a_runs_data_is_refused(changed, said):
    settings = {**OWN, "image_shape": [64, 64, 3], **changed}
    with pytest.raises(UsageError, match=said):
        datasets.describe(settings)


def test_data_of_other_classes_is_not_taken_for_the_runs(monkeypatch, stand_in_dir):
    settings = {
        **OWN,
        "image_shape": [32, 32, 3],
        "data_dir": str(stand_in_dir),
        "data_url": None,
    }
    stand_in = datasets.find("synthetic", str(stand_in_dir))
    monkeypatch.setattr(datasets, "find_for", lambda _: stand_in)
    with pytest.raises(UsageError, match=re.escape("10 classes")):
        datasets.find_again(settings)


@pytest.mark.parametrize("data", data_flag.KINDS)
def test_without_its_place_a_users_data_is_asked_for(data):
    with pytest.raises(UsageError, match="--data_dir"):
        datasets.find(data)
