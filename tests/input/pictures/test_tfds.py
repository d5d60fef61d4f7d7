"""A data set of TensorFlow Datasets, by a stand-in for its module."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input.pictures.dataset import Preparation
from cifar10.input.pictures.tfds import find_tfds
from small_folders import packed, pixels

SIZE = 8


class Features(dict):
    """Less than a dictionary, as the real one."""

    get = None


class Builder:
    """What `tfds.builder` returns, as far as it is used."""

    def __init__(self, home, counts, features=None, labels=lambda number: number % 2):
        self.data_dir = str(home / "tfds" / "pets" / "1.0.0")
        label = SimpleNamespace(names=("cat", "dog"))
        self.info = SimpleNamespace(
            full_name="pets/1.0.0",
            splits={k: SimpleNamespace(num_examples=n) for k, n in counts.items()},
            features=features or Features(image=object(), label=label),
        )
        self._labels = labels
        self.readings = 0

    def download_and_prepare(self):
        pass

    def as_dataset(self, split, decoders, shuffle_files):
        assert decoders == {"image": "undecoded"}
        assert not shuffle_files
        self.readings += 1
        for number in range(self.info.splits[split].num_examples):
            image = packed(pixels(hash_of(split, number), SIZE))
            yield {"image": image, "label": np.int64(self._labels(number))}


def hash_of(split, number):
    return 1000 * len(split) + number


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs the stand-in, and returns what gives it a data set."""

    def install(counts, **options):
        builder = Builder(tmp_path, counts, **options)
        module = ModuleType("tensorflow_datasets")
        module.builder = lambda name, data_dir: builder
        module.as_numpy = iter
        module.decode = SimpleNamespace(SkipDecoding=lambda: "undecoded")
        monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
        return builder

    return install


def find(tmp_path, name="pets", **values):
    values = {"validation_fraction": 0.3, "max_bad_images": 0.0, **values}
    return find_tfds(name, Preparation(tmp_path / "cache", SIZE, **values))


def test_its_parts_become_those_of_the_data_set(tmp_path, installed):
    installed({"train": 30, "validation": 9, "unlabelled": 5})
    dataset = find(tmp_path, "tfds:pets")
    assert dataset.name == "tfds:pets"
    assert dataset.directory == tmp_path / "tfds"
    assert dataset.class_names == ("cat", "dog")
    for split, part, count in (("train", "train", 30), ("test", "validation", 9)):
        images, labels = dataset.read(split)
        assert labels.tolist() == [number % 2 for number in range(count)]
        for number in range(count):
            expected = pixels(hash_of(part, number), SIZE)
            np.testing.assert_array_equal(images[number], expected)


def test_a_second_start_reads_nothing_and_a_damaged_list_is_made_anew(
    tmp_path, installed
):
    counts = {"train": 30, "test": 9}
    installed(counts)
    first = find(tmp_path)
    again = installed(counts)
    (path,) = (tmp_path / "cache").glob("pictures/*/labels.json")
    written = path.stat()
    assert find(tmp_path).fingerprint == first.fingerprint
    assert (again.readings, path.stat().st_ino) == (0, written.st_ino)
    before = path.read_bytes()
    path.write_bytes(before.replace(b"1", b"0"))  # Labels that were exchanged.
    assert find(tmp_path).fingerprint == first.fingerprint
    assert path.read_bytes() == before
    path.unlink()
    path.symlink_to("/dev/zero")
    assert find(tmp_path).fingerprint == first.fingerprint


def test_unusable_data_sets_are_refused(tmp_path, installed, monkeypatch):
    installed({"all": 70})
    with pytest.raises(UsageError, match="split train"):
        find(tmp_path)
    installed({"train": 9}, features=Features(image=object(), text=object()))
    with pytest.raises(UsageError, match="image, text"):
        find(tmp_path)
    installed({"train": 9, "test": 3}, labels=lambda number: -1)
    with pytest.raises(UsageError, match=r"\[-1\]"):
        find(tmp_path)

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UsageError, match="pip install"):
        find(tmp_path)
