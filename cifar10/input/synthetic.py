"""The stand-in: generated images in CIFAR-10's own binary format.

It is for trying things out where CIFAR-10 is not to be had, and for tests. Accuracy on
it says nothing about CIFAR-10.

There are ten classes of one figure each, in a random place, size and pair of colours,
with noise. Which of figure and ground is brighter is random in each colour channel, so
no pixel by itself tells a class and a linear model stays near chance, while a
convolutional network learns the figures within a few hundred steps.

The bytes are the same on every machine: everything is integer arithmetic on the stream
of `numpy.random.RandomState`, which NumPy promises never to change.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError

# The number is the version of the generator. Whoever changes the bytes raises it, so
# that a folder of an older generation is never taken for the new one.
FOLDER = "synthetic-v1"

CLASS_NAMES = (
    "disc",
    "ring",
    "square",
    "frame",
    "triangle",
    "plus",
    "cross",
    "horizontal stripes",
    "vertical stripes",
    "checkerboard",
)
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
NAMES_FILE = "batches.meta.txt"
RECORDS_PER_FILE = 2_000

# Of the files as written, so that a test notices any change of the generator.
SHA256 = {
    "batches.meta.txt": (
        "8d5ac7e98906609a8e39fee9655f9e183677be7378fad267d7918a8878054bb5"
    ),
    "data_batch_1.bin": (
        "3d2ac60c075b03ebf9fd8bed83010681319b31e2c3ecf4fab3f09206fa52c126"
    ),
    "data_batch_2.bin": (
        "8d05df40bbefcdc2e06203bd93275ac3e3a9ef9f2468c0685e48b58959232cc1"
    ),
    "data_batch_3.bin": (
        "4752f5c5b488038b4e84100e24de549dc9929a344940e9efc0b4050213b05fa1"
    ),
    "data_batch_4.bin": (
        "c53a0914c077d4070072e93c0bf111f49131de6c496553e5656a19f0ae0cf6f5"
    ),
    "data_batch_5.bin": (
        "aaf5e5718022502b682dd440faff6535ff0ae317a37b9f73aaca9fc3178e28e1"
    ),
    "test_batch.bin": (
        "24804fe4f41957f4567ac6f4266ce295cd8af342bfc14874ddfe9a969db8cf5a"
    ),
}

SIZE = 32
# How far the figure's middle is from the image's, at most, in pixels, and the half of
# its size: so that most of every figure survives a crop of 24 x 24 pixels.
MAX_SHIFT = 4
MIN_RADIUS = 6
MAX_RADIUS = 10
# Figure and ground differ by 128 +- 48 modulo 256, so by at least 80, in each channel.
CONTRAST_SPREAD = 48
NOISE = 30


def generate(directory: Path) -> None:
    """Writes the stand-in as a new folder, complete or not at all.

    Another process may do the same at the same time: one folder is kept, and both are
    equal.

    Args:
        directory: Path of the folder to be made; its parents are made as well.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{directory.name}."
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=directory.parent
        ) as scratch:
            # A folder of its own inside, because the outer one is for its owner only.
            unpublished = Path(scratch) / directory.name
            unpublished.mkdir()
            _write_files(unpublished)
            _publish(unpublished, directory)
    except OSError as error:
        raise UsageError(
            f"The synthetic stand-in cannot be written to {directory}: "
            f"{error.strerror or error}. Name a writable folder with --data_dir."
        ) from error


def _write_files(directory: Path) -> None:
    """Writes all files into an existing folder."""
    for seed, name in enumerate(TRAIN_FILES + TEST_FILES):
        # Not ndarray.tofile(), which on a full disk does not say so.
        (directory / name).write_bytes(_records(RECORDS_PER_FILE, seed).tobytes())
    names = "".join(f"{name}\n" for name in CLASS_NAMES)
    (directory / NAMES_FILE).write_text(names, encoding="utf-8")


def _publish(unpublished: Path, directory: Path) -> None:
    """Gives the finished folder its name, unless another process was first."""
    try:
        unpublished.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _records(count: int, seed: int) -> np.ndarray:
    """Returns records of as many images of each class, uint8 [count, 3073]."""
    random = np.random.RandomState(seed)
    labels = random.permutation(np.arange(count) % len(CLASS_NAMES))
    figure = _figures(labels, random)[:, np.newaxis]  # bool [count, 1, 32, 32]
    shape = (count, 3, 1, 1)
    ground = _integers(random, 0, 255, shape)
    middle = 128
    contrast = _integers(
        random, middle - CONTRAST_SPREAD, middle + CONTRAST_SPREAD, shape
    )
    images = np.where(figure, (ground + contrast) % 256, ground)
    images += _integers(random, -NOISE, NOISE, (count, 3, SIZE, SIZE))
    pixels = np.clip(images, 0, 255).astype(np.uint8).reshape(count, -1)
    return np.concatenate([labels.astype(np.uint8)[:, np.newaxis], pixels], axis=1)


def _figures(labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Tells which pixels belong to the figures.

    Args:
        labels: int [count], the classes.
        random: Where places and sizes come from.

    Returns:
        bool [count, 32, 32].
    """
    shape = (len(labels), 1, 1)
    radius = _integers(random, MIN_RADIUS, MAX_RADIUS, shape)
    centre = SIZE // 2
    across = np.arange(SIZE) - centre - _integers(random, -MAX_SHIFT, MAX_SHIFT, shape)
    down = np.arange(SIZE)[:, np.newaxis] - centre
    down = down - _integers(random, -MAX_SHIFT, MAX_SHIFT, shape)
    x, y = np.abs(across), np.abs(down)  # int64 [count, 1, 32] and [count, 32, 1]
    square = np.maximum(x, y) <= radius
    half = radius // 2
    stripe = 2 + radius % 3  # Width of a stripe, 2 to 4 pixels.
    rows = down // stripe % 2 == 0
    columns = across // stripe % 2 == 0
    by_class = (
        x * x + y * y <= radius * radius,
        (x * x + y * y <= radius * radius) & (x * x + y * y > half * half),
        square,
        square & (np.maximum(x, y) > half),
        # The width of the triangle grows from its tip downwards.
        square & (2 * x <= down + radius),
        square & (np.minimum(x, y) <= radius // 4),
        square & (np.abs(x - y) <= radius // 4),
        square & rows,
        square & columns,
        square & (rows ^ columns),
    )
    chosen = np.zeros((len(labels), SIZE, SIZE), bool)
    for label, figure in enumerate(by_class):
        members = labels == label
        chosen[members] = figure[members]
    return chosen


def _integers(
    random: np.random.RandomState, low: int, high: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns int64 numbers from `low` to `high`, both included."""
    # The type is named because its default differs between operating systems, and with
    # it the stream.
    return random.randint(low, high + 1, shape, dtype=np.int64)
