"""Prepared pictures on a disk: the same as the array in memory."""

import numpy as np
import pytest
from small_folders import find, numbered, write

from cifar10.input.pictures import shards


@pytest.fixture
def both(tmp_path, monkeypatch):
    """The images of one part in memory, and mapped from several files."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 7 * 8 * 8 * 3)
    names = numbered(30, "a", "b")
    dataset = find(write(tmp_path / "set", *names), tmp_path / "cache")
    in_memory, labels = dataset.read("train")
    monkeypatch.setattr(shards, "IN_MEMORY_BYTES", in_memory.nbytes - 1)
    mapped, same_labels = dataset.read("train")
    assert isinstance(in_memory, np.ndarray)
    assert isinstance(mapped, shards.MappedImages)
    np.testing.assert_array_equal(labels, same_labels)
    return in_memory, mapped


def test_they_have_what_an_array_has(both):
    in_memory, mapped = both
    for name in ("shape", "dtype", "nbytes"):
        assert getattr(mapped, name) == getattr(in_memory, name)
    assert len(mapped) == len(in_memory) > 21


@pytest.mark.parametrize(
    "chosen",
    [
        slice(None),
        slice(5, 19),
        slice(-3, None),
        slice(20, 3, -4),
        slice(9, 9),
        np.array([3, 3, 0, -1, 20, 7, 6]),
        np.array([], np.int64),
        np.arange(30, dtype=np.int32),
    ],
)
def test_an_index_gives_a_copy_of_the_same_images(both, chosen):
    in_memory, mapped = both
    images = mapped[chosen]
    np.testing.assert_array_equal(images, in_memory[chosen])
    assert images.dtype == np.uint8
    images[...] = 0  # Nobody else's.
    np.testing.assert_array_equal(mapped[chosen], in_memory[chosen])


def test_a_mask_gives_the_same_images(both):
    in_memory, mapped = both
    mask = np.arange(len(mapped)) % 3 == 1
    np.testing.assert_array_equal(mapped[mask], in_memory[mask])


@pytest.mark.parametrize("wrong", [10_000, -10_000])
def test_what_is_not_there_is_an_error(both, wrong):
    with pytest.raises(IndexError):
        both[1][np.array([0, wrong])]


def test_the_memory_that_they_take_is_given_back(both, monkeypatch):
    in_memory, mapped = both
    monkeypatch.setattr(shards, "RESIDENT_BYTES", 1)
    advised = []

    class Map:
        def __init__(self, real):
            self._real = real

        def madvise(self, option, *where):
            advised.append(option)
            self._real.madvise(option, *where)

    mapped._maps = [Map(real) for real in mapped._maps]
    np.testing.assert_array_equal(mapped[:9], in_memory[:9])
    assert advised.count(shards.mmap.MADV_DONTNEED) == len(mapped._maps)
    np.testing.assert_array_equal(mapped[:], in_memory)
