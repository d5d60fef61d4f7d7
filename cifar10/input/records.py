"""Reads and verifies the files of CIFAR-10 and CIFAR-100.

A binary file is a sequence of records of equal length. A record is one label byte, then
1,024 red, 1,024 green and 1,024 blue bytes, row by row. CIFAR-100 has two label bytes:
the coarse label, then the fine label. `pickled.py` reads the same records from pickles.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from cifar10.errors import UsageError
from cifar10.input import pickled

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
WITHOUT_VAL: tuple[Split, ...] = ("train", "test")

# Height, width and channels of every image. Like the formats below, they are from
# https://www.cs.toronto.edu/~kriz/cifar.html.
HEIGHT, WIDTH, CHANNELS = IMAGE_SHAPE = (32, 32, 3)

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket
rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
turtle wardrobe whale willow_tree wolf woman worm
"""


_HOST = "https://www.cs.toronto.edu/~kriz/"
_SWIFT = "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/"


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published archive: whoever serves it, size and SHA-256 have to be the same."""

    name: str  # The file name.
    size: int  # In bytes.
    sha256: str  # From TensorFlow Datasets (binary versions) and Keras (Python's).
    urls: tuple[str, ...] = ()  # In the order in which they are tried.


@dataclasses.dataclass(frozen=True)
class Format:
    """The file format of one data set."""

    name: str  # As in `--data`.
    title: str  # The name in messages.
    folder: str  # The only folder in the official archive.
    archive: Archive
    label_bytes: int  # Before each image; the last of these bytes is the label.
    class_names: tuple[str, ...]  # In the order of their labels.
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    train_records_per_file: int
    test_records_per_file: int = 10_000
    label_keys: tuple[str, ...] = ()  # In pickles: names of the labels.

    @property
    def record_bytes(self) -> int:
        """Length of one record."""
        return self.label_bytes + HEIGHT * WIDTH * CHANNELS

    def files(self, split: Split) -> dict[str, int]:
        """Maps the name of each file of a split to its number of records."""
        if split == "train":
            return dict.fromkeys(self.train_files, self.train_records_per_file)
        return dict.fromkeys(self.test_files, self.test_records_per_file)


CIFAR10 = Format(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    archive=Archive(
        name="cifar-10-binary.tar.gz",
        size=170_052_171,
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        # The official host (slow: pytorch/vision#9536); Swift for TensorFlow's copy.
        urls=(f"{_HOST}cifar-10-binary.tar.gz", f"{_SWIFT}cifar-10-binary.tar.gz"),
    ),
    label_bytes=1,
    class_names=tuple(_CIFAR10_CLASSES.split()),
    train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test_files=("test_batch.bin",),
    train_records_per_file=10_000,
)

CIFAR100 = Format(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-binary",
    archive=Archive(
        name="cifar-100-binary.tar.gz",
        size=168_513_733,
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        urls=(f"{_HOST}cifar-100-binary.tar.gz",),
    ),
    label_bytes=2,
    class_names=tuple(_CIFAR100_CLASSES.split()),
    train_files=("train.bin",),
    test_files=("test.bin",),
    train_records_per_file=50_000,
)


def read_split(
    directory: Path, file_format: Format, split: Split
) -> tuple[np.ndarray, np.ndarray]:
    """Reads and verifies all images of one split.

    Returns:
        Images, uint8 [count, 32, 32, 3], and labels, int32 [count], in files' order.
    """
    check_files(directory, file_format, splits=(split,))
    files, classes = file_format.files(split), len(file_format.class_names)
    images = np.empty((sum(files.values()), HEIGHT, WIDTH, CHANNELS), np.uint8)
    labels = np.empty(len(images), np.int32)
    first = 0
    for name, count in files.items():
        path = directory / name
        with explained(path):
            if file_format.label_keys:
                records = pickled.read_records(path, file_format.label_keys, count)
            else:
                records = np.fromfile(path, np.uint8)
                records = records.reshape(count, file_format.record_bytes)
        file_labels = records[:, file_format.label_bytes - 1]
        wrong = np.flatnonzero(file_labels >= classes)
        if wrong.size:
            found = f"{path}, record {wrong[0]}: the label is {file_labels[wrong[0]]}"
            rule = f"labels of {file_format.title} are 0 to {classes - 1}"
            raise _damaged(directory, f"{found}, but {rule}.")
        rows = slice(first, first + count)
        labels[rows] = file_labels
        planes = records[:, file_format.label_bytes :]
        planes = planes.reshape(count, CHANNELS, HEIGHT, WIDTH)
        # One strided copy per colour is twice as fast as one transposed copy.
        for channel in range(CHANNELS):
            images[rows, :, :, channel] = planes[:, channel]
        first += count
    return images, labels


def check_files(
    directory: Path, file_format: Format, splits: Sequence[Split] = WITHOUT_VAL
) -> None:
    """Verifies that the files of the given splits exist and have the right sizes."""
    length = file_format.record_bytes
    with explained(directory):
        files = {k: v for split in splits for k, v in file_format.files(split).items()}
        if missing := [name for name in files if not (directory / name).is_file()]:
            raise _damaged(directory, f"{directory} lacks {', '.join(missing)}.")
        for name, expected in files.items():
            size = (directory / name).stat().st_size
            # The size of a pickle says little; reading it checks more.
            if size != (wanted := expected * length) and not file_format.label_keys:
                found = f"{directory / name} has {size:,} bytes"
                rule = f"this file of {file_format.title} must have {wanted:,}"
                raise _damaged(directory, f"{found}, but {rule}.")


def _damaged(directory: Path, problem: str) -> UsageError:
    # Not "delete": the folder may contain the user's own files.
    return UsageError(
        f"{problem}\nPut the right file into {directory}, or move this folder away and "
        "run again without --data_dir for a fresh copy, or name another folder."
    )


@contextlib.contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns an `OSError` raised in the block into a `UsageError`, with advice."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be read or written: "
            f"{error.strerror or error}.\nFree some space, change the permissions, or "
            "name another folder with --data_dir."
        ) from error
