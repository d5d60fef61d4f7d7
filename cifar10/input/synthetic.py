"""The stand-in: generated images in CIFAR-10's own binary format.

It is for trying things out where CIFAR-10 is not available, and for tests. Accuracy on
it says nothing about CIFAR-10.

Each of the ten classes is a figure, drawn with a random position, size and pair of
colours, and with noise. Whether figure or background is brighter is random in each
colour channel, so no single pixel reveals the class and a linear model stays near
chance, while a convolutional network learns the figures within a few hundred steps.

The bytes are the same on every machine: everything is integer arithmetic on the stream
of `numpy.random.RandomState`, which NumPy promises never to change.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from cifar10.input import records

# The number is the version of the generator. A change of the bytes must raise it, so
# that a folder of an older version is never mistaken for the new one.
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
FORMAT = dataclasses.replace(
    records.CIFAR10,
    name="synthetic",
    title="the synthetic stand-in",
    folder=FOLDER,
    train_records_per_file=2_000,
    test_records_per_file=2_000,
    default_names=CLASS_NAMES,
)

SIZE = 32
# Largest distance of a figure's centre from the image's, and half the figure's size, in
# pixels: most of every figure survives a crop of 24 x 24 pixels.
MAX_SHIFT = 4
MIN_RADIUS = 6
MAX_RADIUS = 10
# In each channel, figure and background differ by 128 +- 48 modulo 256: at least 80.
CONTRAST_SPREAD = 48
NOISE = 30


def generate(directory: Path) -> None:
    """Writes the stand-in as a new folder, complete or not at all.

    Its parents are created as well. If another process does so at the same time, one
    of the two equal folders is kept.
    """
    with records.explained(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{directory.name}.", dir=directory.parent
        ) as scratch:
            # A folder within it, because only its owner may read the scratch folder.
            unpublished = Path(scratch) / directory.name
            unpublished.mkdir()
            files = FORMAT.files("train") | FORMAT.files("test")
            for seed, (name, count) in enumerate(files.items()):
                # Not ndarray.tofile(), which does not report a full disk.
                (unpublished / name).write_bytes(_records(count, seed).tobytes())
            names = "".join(f"{name}\n" for name in CLASS_NAMES)
            (unpublished / FORMAT.names_file).write_text(names, encoding="utf-8")
            try:
                unpublished.rename(directory)
            except OSError:
                if not directory.is_dir():
                    raise


def _records(count: int, seed: int) -> np.ndarray:
    """Returns records with equally many images of each class, uint8 [count, 3073]."""
    random = np.random.RandomState(seed)
    labels = random.permutation(np.arange(count) % len(CLASS_NAMES))
    figure = _figures(labels, random)[:, np.newaxis]  # bool [count, 1, 32, 32]
    shape = (count, 3, 1, 1)
    background = _integers(random, 0, 255, shape)
    middle = 128
    contrast = _integers(
        random, middle - CONTRAST_SPREAD, middle + CONTRAST_SPREAD, shape
    )
    images = np.where(figure, (background + contrast) % 256, background)
    images += _integers(random, -NOISE, NOISE, (count, 3, SIZE, SIZE))
    pixels = np.clip(images, 0, 255).astype(np.uint8).reshape(count, -1)
    return np.concatenate([labels.astype(np.uint8)[:, np.newaxis], pixels], axis=1)


def _figures(labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Returns which pixels belong to the figures, bool [count, 32, 32]."""
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
    # The default type, and with it the stream, differs between operating systems.
    return random.randint(low, high + 1, shape, dtype=np.int64)
