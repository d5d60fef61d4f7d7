"""Helpers: CIFAR-10 and CIFAR-100 with two records a file; images that are no array."""

import dataclasses

import numpy as np

import sites
from cifar10.input import cifar, records

# Two records a file, so that a whole data set is written in no time.
SMALL = {
    base.name: dataclasses.replace(
        base, train_records_per_file=2, test_records_per_file=2
    )
    for base in (records.CIFAR10, records.CIFAR100)
}
_PYTHON = dict(cifar.PYTHON_FORMATS)  # Some tests put small ones there.


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


def of_python(name):
    """Returns the format of the Python version of a small data set."""
    archive = dataclasses.replace(_PYTHON[name].archive, urls=())
    counts = {"train_records_per_file": 2, "test_records_per_file": 2}
    return dataclasses.replace(_PYTHON[name], archive=archive, **counts)


def write_pickles(directory, name):
    """Writes the Python version of a small data set."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in pickles(name).items():
        (directory / file).write_bytes(content)


def packed_pickles(name):
    """Returns the archive of the Python version of a small data set."""
    folder = of_python(name).folder
    return sites.packed(
        {f"{folder}/{file}": content for file, content in pickles(name).items()}
    )


def pickles(name):
    """Returns the Python version of each file of a small data set."""
    keys = of_python(name).label_keys
    found = {}
    for file, content in contents(name).items():
        rows = np.frombuffer(content, np.uint8).reshape(2, -1)
        labels = {key: rows[:, i].tolist() for i, key in enumerate(keys)}
        found[file.removesuffix(".bin")] = python2_pickle(labels, rows[:, len(keys) :])
    return found


def python2_pickle(labels, pixels, *, by_columns=False):
    """Returns what Python 2's cPickle wrote, by protocol 2, for a batch of CIFAR.

    Python 3 would write texts by other opcodes.
    """

    def text(value):
        return b"U" + bytes([len(value)]) + value.encode()

    def number(value):
        kind, size = (b"K", 1) if value < 256 else (b"M", 2)
        return kind + value.to_bytes(size, "little")

    count, width = pixels.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02"
        + number(0) + b"\x85" + text("b") + b"\x87Rq\x03("
        + number(1) + number(count) + number(width) + b"\x86cnumpy\ndtype\nq\x04"
        + text("u1") + number(0) + number(1) + b"\x87Rq\x05("
        + number(3) + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        + number(0) + b"tb" + (b"\x88T" if by_columns else b"\x89T")
        + pixels.size.to_bytes(4, "little")
        + pixels.tobytes("F" if by_columns else "C") + b"tb"
    )  # fmt: skip
    lists = (
        text(key) + b"]q\x06(" + b"".join(map(number, values)) + b"e"
        for key, values in labels.items()
    )
    names = (
        text("filenames") + b"](" + text("leptodactylus_s_000004.png") * count + b"e"
    )
    label = text("batch_label") + text("training batch 1 of 5")
    return (
        b"\x80\x02}q\x00(" + label + b"".join(lists) + text("data") + array
        + names + b"u."
    )  # fmt: skip


def packed(name):
    """Returns the archive of a small data set."""
    folder = SMALL[name].folder
    return sites.packed(
        {f"{folder}/{file}": content for file, content in contents(name).items()}
    )


PACKED = {name: packed(name) for name in SMALL}
