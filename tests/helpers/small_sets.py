"""Helpers: CIFAR-10 and CIFAR-100 with two records a file; images that are no array."""

import dataclasses

import numpy as np

import sites
from cifar10.input import records

# Two records a file, so that a whole data set is written in no time.
SMALL = {
    base.name: dataclasses.replace(
        base, train_records_per_file=2, test_records_per_file=2
    )
    for base in (records.CIFAR10, records.CIFAR100)
}


class OnDisk:
    """Images that a data set does not hold in memory; it counts those that are read.

    Attributes:
        chosen: What was asked for, in order.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, images):
        self.shape, self.nbytes = images.shape, images.nbytes
        self.chosen = []
        self._images = images

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, chosen):
        assert isinstance(chosen, slice | np.ndarray), "no more is promised"
        self.chosen.append(chosen)
        return self._images[chosen]

    def __array__(self, *_, **__):
        raise AssertionError("all images would be read")

    def count(self):
        """Returns how often each image was read."""
        counts = np.zeros(len(self), int)
        for chosen in self.chosen:
            np.add.at(counts, chosen, 1)
        return counts


def joined(towers):
    """Returns the images and labels of all towers' batches, in order."""
    return tuple(np.concatenate(part) for part in zip(*towers, strict=True))


def assert_equal(batches, expected):
    """Compares pairs of images and labels bit for bit."""
    for (images, labels), (others, other_labels) in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(labels, other_labels)
        np.testing.assert_array_equal(images, others)


def contents(name):
    """Returns the bytes of each file of a small data set whose labels are all 3."""
    file_format = SMALL[name]
    record = bytes([3] * file_format.label_bytes) + bytes(range(256)) * 12
    files = file_format.train_files + file_format.test_files
    return dict.fromkeys(files, record * 2)


def write_files(directory, name):
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in contents(name).items():
        (directory / file).write_bytes(content)


def packed(name):
    """Returns the archive of a small data set."""
    folder = SMALL[name].folder
    return sites.packed(
        {f"{folder}/{file}": content for file, content in contents(name).items()}
    )


PACKED = {name: packed(name) for name in SMALL}
