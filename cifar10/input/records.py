"""The binary formats of CIFAR-10 and CIFAR-100: files on disk to arrays in memory.

A file is a row of records of one length and nothing else. A record is one label byte
(in CIFAR-100 two, the coarse label and then the fine one), then 1,024 red, 1,024 green
and 1,024 blue bytes, each colour row by row.

This module reads one folder and verifies what it reads. It neither looks for folders
nor fills them; `datasets.py` does.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np

from cifar10.errors import UsageError

Split = Literal["train", "test"]

# Height, width and channels of every image (https://www.cs.toronto.edu/~kriz/cifar.html).
HEIGHT = 32
WIDTH = 32
CHANNELS = 3
IMAGE_BYTES = HEIGHT * WIDTH * CHANNELS


@dataclasses.dataclass(frozen=True)
class Format:
    """One data set's files and records.

    Args:
        name: Short name, as in `--data`.
        title: Name in messages.
        folder: Folder in the official archive.
        label_bytes: Label bytes before each image; the last of them is the label.
        classes: Labels are 0 to `classes - 1`.
        train_files: Files of the training set, in order.
        test_files: Files of the test set, in order.
        train_records_per_file: Records in each training file.
        test_records_per_file: Records in each test file.
        names_file: Text file with one class name a line.
        default_names: Class names where that file is missing; empty for none.
    """

    name: str
    title: str
    folder: str
    label_bytes: int
    classes: int
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    train_records_per_file: int
    test_records_per_file: int
    names_file: str
    default_names: tuple[str, ...] = ()

    @property
    def record_bytes(self) -> int:
        """Length of one record."""
        return self.label_bytes + IMAGE_BYTES

    @property
    def all_files(self) -> tuple[str, ...]:
        """Names of all data files."""
        return self.train_files + self.test_files

    def files(self, split: Split) -> tuple[str, ...]:
        """Returns the names of the files of a split."""
        return self.train_files if split == "train" else self.test_files

    def records_per_file(self, split: Split) -> int:
        """Returns how many records each file of a split holds."""
        if split == "train":
            return self.train_records_per_file
        return self.test_records_per_file


CIFAR10 = Format(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    label_bytes=1,
    classes=10,
    train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test_files=("test_batch.bin",),
    train_records_per_file=10_000,
    test_records_per_file=10_000,
    names_file="batches.meta.txt",
    default_names=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
)

CIFAR100 = Format(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-binary",
    label_bytes=2,
    classes=100,
    train_files=("train.bin",),
    test_files=("test.bin",),
    train_records_per_file=50_000,
    test_records_per_file=10_000,
    names_file="fine_label_names.txt",
)


def missing_files(directory: Path, file_format: Format) -> tuple[str, ...]:
    """Returns the names of the data files that a folder lacks, in order.

    The file of class names is not one of them: reading does without it.
    """
    return tuple(
        name for name in file_format.all_files if not (directory / name).exists()
    )


def check_files(directory: Path, file_format: Format) -> None:
    """Verifies that every file is there and has the right size, without reading it.

    Args:
        directory: The folder with the `.bin` files.
        file_format: What it should hold.

    Raises:
        UsageError: A file is missing, empty, cut short or has too many records.
    """
    try:
        missing = missing_files(directory, file_format)
        if missing:
            raise _broken(directory, f"{directory} lacks {', '.join(missing)}.")
        splits: tuple[Split, ...] = ("train", "test")
        for split in splits:
            for name in file_format.files(split):
                path = directory / name
                _check_size(path, path.stat().st_size, file_format, split)
    except OSError as error:
        raise _unreadable(directory, error) from error


def read_split(
    directory: Path, file_format: Format, split: Split
) -> tuple[np.ndarray, np.ndarray]:
    """Reads and verifies all images of one split.

    Args:
        directory: The folder with the `.bin` files.
        file_format: What they hold.
        split: "train" or "test".

    Returns:
        Images, uint8 [count, 32, 32, 3], and labels, int32 [count], in the order of
        the files.

    Raises:
        UsageError: A file is missing, unreadable, not of whole records or not of the
            right number of them, or a label is out of range. The message names the
            file and, where there is one, the record and its byte.
    """
    names = file_format.files(split)
    per_file = file_format.records_per_file(split)
    images = np.empty((len(names) * per_file, HEIGHT, WIDTH, CHANNELS), np.uint8)
    labels = np.empty(len(names) * per_file, np.int32)
    for number, name in enumerate(names):
        path = directory / name
        records = _read_records(path, file_format, split)
        _check_labels(path, records, file_format)
        rows = slice(number * per_file, (number + 1) * per_file)
        planes = records[:, file_format.label_bytes :]
        planes = planes.reshape(per_file, CHANNELS, HEIGHT, WIDTH)
        # One strided copy a colour is twice as fast as one transposed copy.
        for channel in range(CHANNELS):
            images[rows, :, :, channel] = planes[:, channel]
        labels[rows] = records[:, file_format.label_bytes - 1]
    return images, labels


def class_names(directory: Path, file_format: Format) -> tuple[str, ...]:
    """Returns the name of each class, from the folder's file of names if it has one.

    Raises:
        UsageError: That file cannot be read or has the wrong number of names.
    """
    path = directory / file_format.names_file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        numbered = tuple(f"class {label}" for label in range(file_format.classes))
        return file_format.default_names or numbered
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise _broken(path.parent, f"{path} is not text: {error}.") from error
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) != file_format.classes:
        rule = f"{file_format.title} has {file_format.classes}"
        raise _broken(directory, f"{path} names {len(names)} classes, but {rule}.")
    return names


def _read_records(path: Path, file_format: Format, split: Split) -> np.ndarray:
    """Returns a whole file, uint8 [records, record_bytes]."""
    try:
        content = np.fromfile(path, np.uint8)
    except FileNotFoundError as error:
        raise _broken(path.parent, f"{path} is missing.") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_size(path, content.size, file_format, split)
    return content.reshape(-1, file_format.record_bytes)


def _check_size(path: Path, size: int, file_format: Format, split: Split) -> None:
    """Raises `UsageError` unless `size` bytes are the right number of records."""
    length = file_format.record_bytes
    expected = file_format.records_per_file(split)
    if path.is_dir():
        raise _broken(path.parent, f"{path} is a folder, not a file.")
    if size == 0:
        raise _broken(path.parent, f"{path} is empty.")
    count, rest = divmod(size, length)
    if rest:
        problem = (
            f"{path} is {size} bytes, not a multiple of the {length} bytes of a record:"
            f" record {count}, at byte {count * length}, ends after {rest} bytes."
        )
        raise _broken(path.parent, problem)
    if count != expected:
        problem = (
            f"{path} holds {count} records ({size} bytes), but this file of "
            f"{file_format.title} has {expected} ({expected * length} bytes)."
        )
        raise _broken(path.parent, problem)


def _check_labels(path: Path, records: np.ndarray, file_format: Format) -> None:
    """Raises `UsageError` naming the first record whose label is out of range."""
    position = file_format.label_bytes - 1
    labels = records[:, position]
    wrong = np.flatnonzero(labels >= file_format.classes)
    if wrong.size:
        record = int(wrong[0])
        offset = record * file_format.record_bytes + position
        problem = (
            f"{path}, record {record}, byte {offset}: the label is {labels[record]}, "
            f"but labels of {file_format.title} are 0 to {file_format.classes - 1}."
        )
        raise _broken(path.parent, problem)


def _broken(directory: Path, problem: str) -> UsageError:
    """Returns the error for a damaged copy, with the ways on."""
    # Moving away rather than deleting: the folder may hold files of the user's own.
    return UsageError(
        f"{problem} Move {directory} away and run again for a fresh copy, put the "
        "right file there, or name another folder with --data_dir."
    )


def _unreadable(path: Path, error: OSError) -> UsageError:
    """Returns the error for what the operating system will not let us read."""
    return UsageError(
        f"{error.filename or path} cannot be read: {error.strerror or error}. Mend its "
        "permissions or name another folder with --data_dir."
    )
