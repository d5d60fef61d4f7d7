"""Helpers: CIFAR-10 and CIFAR-100 with two records a file."""

import dataclasses

import sites

from cifar10.input import records

# Two records a file, so that a whole data set is written in no time.
SMALL = {
    base.name: dataclasses.replace(
        base, train_records_per_file=2, test_records_per_file=2
    )
    for base in (records.CIFAR10, records.CIFAR100)
}


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
