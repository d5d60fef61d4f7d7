"""A data set of TensorFlow Datasets, by a stand-in for its module."""

import hashlib
import sys
import types

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input.pictures import tfds
from small_folders import everything, packed, pixels

SIZE = 8


class Label:
    names = ("cat", "dog")


class Features:
    """Less than a dictionary, as the real one."""

    def __init__(self, **features):
        self._features = features

    def __contains__(self, name):
        return name in self._features

    def __getitem__(self, name):
        return self._features[name]

    def __iter__(self):
        return iter(self._features)


class Builder:
    """What `tfds.builder` returns, as far as it is used."""

    def __init__(self, home, counts, features=None, labels=None):
        self.data_dir = str(home / "tfds" / "pets" / "1.0.0")
        splits = {k: types.SimpleNamespace(num_examples=n) for k, n in counts.items()}
        self.info = types.SimpleNamespace(
            full_name="pets/1.0.0",
            splits=splits,
            features=features or Features(image=object(), label=Label()),
        )
        self._labels = labels or (lambda number: number % 2)
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
        module = types.ModuleType("tensorflow_datasets")
        module.builder = lambda name, data_dir: builder
        module.as_numpy = iter
        module.decode = types.SimpleNamespace(SkipDecoding=lambda: "undecoded")
        monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
        return builder

    return install


def find(tmp_path, name="pets", **values):
    values = {"validation_fraction": 0.3, "max_bad_images": 0.0, **values}
    return tfds.find(name, image_size=SIZE, cache=tmp_path / "cache", **values)


@pytest.mark.parametrize("test_part", ["test", "validation"])
def test_its_parts_become_those_of_the_data_set(tmp_path, installed, test_part):
    installed({"train": 70, test_part: 9, "unlabelled": 5})
    dataset = find(tmp_path, "tfds:pets")
    assert dataset.name == "tfds:pets"
    assert dataset.directory == tmp_path / "tfds"
    assert dataset.class_names == ("cat", "dog")
    for split, part, count in (("train", "train", 70), ("test", test_part, 9)):
        images, labels = dataset.read(split)
        assert labels.tolist() == [number % 2 for number in range(count)]
        for number in range(count):
            np.testing.assert_array_equal(
                images[number], pixels(hash_of(part, number), SIZE)
            )


def test_without_a_test_part_it_is_split_as_a_folder_is(tmp_path, installed):
    installed({"train": 100})
    images, tests = everything(find(tmp_path))
    assert len(images) == 100
    assert len(tests) == 30
    _, labels = find(tmp_path).read("test")
    assert np.bincount(labels).tolist() == [15, 15], "of each class"
    for name, image in images.items():
        number = int(name.removeprefix("train/"))
        np.testing.assert_array_equal(image, pixels(hash_of("train", number), SIZE))
    more = everything(find(tmp_path, validation_fraction=0.6))[1]
    assert tests < more


def test_a_second_start_reads_nothing(tmp_path, installed):
    first = find_with(installed({"train": 70, "test": 9}), tmp_path)
    again = installed({"train": 70, "test": 9})
    assert find_with(again, tmp_path).fingerprint == first.fingerprint
    assert again.readings == 0


def find_with(_builder, tmp_path):
    return find(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"[[1], [2], [3]]", b"\xff", b"3"])
def test_a_damaged_list_is_made_anew(tmp_path, installed, content):
    first = find_with(installed({"train": 70, "test": 9}), tmp_path)
    (path,) = (tmp_path / "cache").glob("pictures/*/listing.json")
    before = path.read_bytes()
    # Labels that were exchanged, too: what is kept has its own SHA-256.
    digest = hashlib.sha256(content).hexdigest().encode()
    for damaged in (content, digest + b"\n" + content, before.replace(b"1", b"0")):
        path.write_bytes(damaged)
        again = find_with(installed({"train": 70, "test": 9}), tmp_path)
        assert again.fingerprint == first.fingerprint
        assert path.read_bytes() == before
    path.unlink()
    path.symlink_to("/dev/zero")
    assert find_with(installed({"train": 70, "test": 9}), tmp_path) == first


def test_bad_pictures_are_named(tmp_path, installed, monkeypatch):
    builder = installed({"train": 70, "test": 9})
    real = builder.as_dataset

    def broken(**options):
        for number, example in enumerate(real(**options)):
            yield {**example, "image": b"broken"} if number == 3 else example

    monkeypatch.setattr(builder, "as_dataset", broken)
    with pytest.raises(UsageError, match="2 of 79 pictures in tfds:pets cannot"):
        find(tmp_path)
    dataset = find(tmp_path, max_bad_images=0.1)
    assert "train/00000003 is neither" in dataset.bad
    assert len(dataset.read("train")[1]) == 69


def test_what_cannot_be_trained_is_a_sentence(tmp_path, installed, monkeypatch):
    installed({"all": 70})
    with pytest.raises(UsageError, match="no split train, only all"):
        find(tmp_path)
    installed({"train": 9}, features=Features(image=object(), text=object()))
    with pytest.raises(UsageError, match="has image, text; an image and a label"):
        find(tmp_path)
    installed({"train": 9, "test": 3}, labels=lambda number: -1)
    with pytest.raises(UsageError, match="train/00000000 has the label -1"):
        find(tmp_path)

    def unknown(name, **_):
        raise ValueError(f"Dataset {name} not found")

    monkeypatch.setattr(sys.modules["tensorflow_datasets"], "builder", unknown)
    with pytest.raises(UsageError, match="does not give none: Dataset none not found"):
        find(tmp_path, "none")


def test_without_the_package_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UsageError, match="pip install tensorflow-datasets"):
        find(tmp_path)
