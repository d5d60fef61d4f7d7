"""Images that are read from their files batch by batch."""

import os

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input import dataset_base, pipeline
from cifar10.input.pictures import shards
from cifar10.input.pictures.shards import ImagesOnDisk
from small_folders import find, numbered, write

COUNT, PER_FILE = 23, 7
SHAPE = (COUNT, 5, 9, 3)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


@pytest.fixture
def paths(tmp_path, images):
    written = [tmp_path / f"{first}.bin" for first in range(0, COUNT, PER_FILE)]
    for number, path in enumerate(written):
        path.write_bytes(images[number * PER_FILE :][:PER_FILE].tobytes())
    return written


def test_images_on_a_disk_are_indexed_as_an_array_is(images, paths):
    on_disk = ImagesOnDisk(paths, SHAPE[1:], PER_FILE, np.arange(COUNT))
    assert not pipeline.is_in_memory(on_disk)
    described = len(on_disk), on_disk.shape, on_disk.nbytes, on_disk.dtype
    assert described == (COUNT, images.shape, images.nbytes, images.dtype)
    for chosen in (
        np.array([22, 0, 7, 6, 7, 13]),
        np.array([-1, -23]),
        np.arange(COUNT) % 3 == 0,
        slice(5, 16),
        slice(20, 3, -4),
    ):
        found = on_disk[chosen]
        np.testing.assert_array_equal(found, images[chosen])
        assert (found.dtype, type(found)) == (np.uint8, np.ndarray)
        assert found.flags.writeable
    numbers = np.array([9, 2, 21, 6, 6])
    some = ImagesOnDisk(paths, SHAPE[1:], PER_FILE, numbers)
    np.testing.assert_array_equal(some[np.array([4, -4])], images[[6, 2]])
    np.testing.assert_array_equal(some[:], images[numbers])
    # A part of them, as --val_fraction and --corrections make.
    part, expected = dataset_base.selected(on_disk, numbers), images[numbers]
    described = len(part), part.shape, part.nbytes, part.dtype
    assert described == (5, expected.shape, expected.nbytes, expected.dtype)
    np.testing.assert_array_equal(part[1:4], expected[1:4])
    for number in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            on_disk[np.array([0, number])]


def test_prepared_pictures_too_large_for_memory_stay_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_PICTURES", 7)
    photos = write(tmp_path / "set", *numbered(30, "a", "b"))
    dataset = find(photos, tmp_path / "cache")
    in_memory, labels = dataset.read("train")
    monkeypatch.setattr(shards, "IN_MEMORY_BYTES", in_memory.nbytes - 1)
    on_disk, same_labels = dataset.read("train")
    assert type(in_memory) is np.ndarray
    assert isinstance(on_disk, ImagesOnDisk)
    np.testing.assert_array_equal(on_disk[:], in_memory)
    np.testing.assert_array_equal(labels, same_labels)


def test_a_truncated_file_is_named(paths):
    os.truncate(paths[-1], 200)
    on_disk = ImagesOnDisk(paths, SHAPE[1:], PER_FILE, np.arange(COUNT))
    assert on_disk[np.array([0, 21])].any()
    with pytest.raises(UsageError, match=str(paths[-1])):
        on_disk[np.array([22])]
