"""The `val` split of every kind of data: which data have one, and what is in it."""

import shutil

import numpy as np
import pytest

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import datasets
from cifar10.input.pictures.arrays import find_npz
from cifar10.input.records import SPLITS
from cifar10.input.regrouping import with_val
from cifar10.interface.data import as_dataset
from recorded_runs import recorded
from small_folders import find, numbered, write

IMAGES = np.arange(60, dtype=np.uint8).reshape(60, 1, 1, 1).repeat(3, axis=3)
LABELS = np.arange(60, dtype=np.int64) % 2
PAIRS = tuple((IMAGES[first::3], LABELS[first::3]) for first in range(3))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def content(dataset):
    """The number of images of each split."""
    return {split: len(dataset.read(split)[1]) for split in dataset.splits}


def test_val_fraction_gives_cifar_a_val_split(stand_in_dir):
    whole = datasets.find("synthetic", str(stand_in_dir))
    assert (whole.splits, whole.validation_split) == (("train", "test"), "test")
    divided = with_val(whole, 0.1)
    assert divided.validation_split == "val"
    splits = {split: divided.read(split) for split in ("train", "val")}
    images, labels = whole.read("train")
    assert len(splits["val"][1]) == pytest.approx(len(labels) / 10, abs=10)
    counts = np.bincount(splits["val"][1])
    assert counts.min() == pytest.approx(counts.max(), abs=2), "class by class"
    seen = np.concatenate([one.reshape(len(one), -1) for one, _ in splits.values()])
    assert sorted(map(bytes, seen)) == sorted(map(bytes, images)), "each image once"
    again = with_val(whole, 0.1)
    np.testing.assert_array_equal(again.read("val")[0], splits["val"][0])
    np.testing.assert_array_equal(divided.read("test")[1], whole.read("test")[1])


def test_arrays_have_three_splits(tmp_path):
    train, val, test = PAIRS
    given = as_dataset((train, val, test))
    np.testing.assert_array_equal(given.read("val")[0], val[0])
    np.testing.assert_array_equal(given.read("test")[0], test[0])
    arrays = {"x_train": train[0], "y_train": train[1]}
    arrays |= {"x_test": test[0], "y_test": test[1]}
    np.savez(tmp_path / "two.npz", **arrays)
    np.savez(tmp_path / "three.npz", **arrays, x_val=val[0], y_val=val[1])
    two, three = (find_npz(tmp_path / f"{name}.npz") for name in ("two", "three"))
    assert two.validation_split == "test"
    assert three.fingerprint != two.fingerprint
    np.testing.assert_array_equal(three.read("val")[0], val[0])
    held = with_val(as_dataset((train, test)), 0.2)
    assert content(held) == {"train": 16, "val": 4, "test": 20}
    assert content(with_val(as_dataset(train), 0.2)) == {"train": 16, "val": 4}
    # A split that is there needs no fraction, and one to score is not divided.
    assert with_val(given, 0.2) is given
    assert content(with_val(as_dataset(test, "test"), 0.2)) == {"test": 20}


def test_a_folder_has_three_splits(tmp_path, cache):
    names = [
        name
        for split, count in (("train", 9), ("val", 3), ("test", 5))
        for name in numbered(count, f"{split}/cat", f"{split}/dog")
    ]
    folder = write(tmp_path / "photos", *names)
    dataset = find(folder, cache)
    assert content(dataset) == {"train": 18, "test": 10, "val": 6}
    assert all(path.startswith("val/") for path in dataset.paths["val"])
    # Read from the cache, they are the same.
    again = find(folder, cache)
    np.testing.assert_array_equal(again.read("val")[0], dataset.read("val")[0])
    assert again.fingerprint == dataset.fingerprint
    shutil.rmtree(folder / "val")
    two = find(folder, cache)
    assert content(two) == {"train": 18, "test": 10}
    assert two.fingerprint != dataset.fingerprint


def test_a_folder_is_divided_into_three_splits(tmp_path, cache):
    folder = write(tmp_path / "photos", *numbered(20, "cat", "dog"))
    two = find(folder, cache)
    three = find(folder, cache, val_fraction=0.2)
    assert content(three) == {"train": 20, "test": 12, "val": 8}
    assert three.paths["test"] == two.paths["test"], "val moves no test picture"
    write(folder, *(f"cat/new {number}.png" for number in range(20)))
    run = recorded(
        data_division=three.division,
        class_names=three.class_names,
        validation_fraction=0.3,
        val_fraction=0.2,
    )
    later = find(folder, cache, val_fraction=0.2, run=run)
    assert {*three.paths["val"]} < {*later.paths["val"]}
    assert not {*three.paths["train"]} & {*later.paths["val"], *later.paths["test"]}
    # Where the test split is given, only the rest is divided.
    names = numbered(10, "train/cat", "train/dog", "test/cat", "test/dog")
    given = find(write(tmp_path / "given", *names), cache, val_fraction=0.2)
    assert content(given) == {"train": 16, "test": 20, "val": 4}


@pytest.mark.parametrize("given", [{"val_fraction": 0.2}, {"validation_fraction": 0.3}])
def test_a_fraction_for_a_given_split_is_refused_before_preparation(
    tmp_path, cache, given
):
    names = [f"{split}/{name}" for split in SPLITS for name in ("cat", "dog")]
    folder = write(tmp_path / "photos", *numbered(2, *names))
    with pytest.raises(UsageError, match=f"{next(iter(given))}.*Omit it"):
        find(folder, cache, **given)
    assert not cache.exists()
    of_run = recorded(class_names=["cat", "dog"], **given)
    wanted = {"validation_fraction": 0.1, **given}
    kept = find(folder, cache, **wanted, run=of_run)
    assert content(kept) == {"train": 4, "test": 4, "val": 4}, "an earlier run goes on"
    other = recorded(class_names=["cat", "dog"], data_division="")
    with pytest.raises(UsageError, match=f"{next(iter(given))}.*Omit it"):
        find(folder, cache, **wanted, run=other)  # For a run with another's weights.


def test_a_val_fraction_of_arrays_with_val_is_refused():
    wanted, arrays = Config(val_fraction=0.2).dataset, as_dataset(PAIRS)
    with pytest.raises(UsageError, match=r"--val_fraction 0.2: .*Omit it"):
        datasets.find_for(wanted, arrays)
    of_run = recorded(val_fraction=0.2)
    assert datasets.find_for(wanted, arrays, run=of_run) is arrays
    with pytest.raises(UsageError, match=r"--val_fraction 0.2: .*Omit it"):
        datasets.find_for(wanted, arrays, run=recorded(val_fraction=0.1))
