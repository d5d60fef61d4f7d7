"""Generates the stand-in for CIFAR-10: synthetic images in CIFAR-10's binary format.

The stand-in is for tests, and for trials where CIFAR-10 is not available. Accuracy on
the stand-in says nothing about accuracy on CIFAR-10.

Each of the ten classes is a figure with a random position, size and contrast. It is
drawn among small squares and noise, on a background whose colour changes from corner to
corner. Most figures have the typical colour of their class, but a linear model
classifies less than 60 % of the images correctly. Faint figures without that colour are
hard for any model. So a model improves from the first steps to the last, as it does on
photographs. Some training images have a wrong label, so overconfidence raises the loss.
Without typical colours, the tutorial's recipe learns nothing for hundreds of steps and
then all at once; without wrong labels, its loss jumps (`dev/LOG.md`).

The bytes are the same on every machine, because they are computed in integers from the
stream of `numpy.random.RandomState`, which NumPy promises never to change.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from cifar10.input import records

# The number is the version of the generator. Raise it with any change of the bytes, so
# that a folder of an older version is never mistaken for the new one.
FOLDER = "synthetic-v3"

CLASS_NAMES = (
    *("disc", "ring", "square", "frame", "triangle", "plus", "cross"),
    *("horizontal stripes", "vertical stripes", "checkerboard"),
)
FORMAT = dataclasses.replace(
    records.CIFAR10,
    name="synthetic",
    title="the synthetic stand-in",
    folder=FOLDER,
    train_records_per_file=2_000,
    test_records_per_file=2_000,
    class_names=CLASS_NAMES,
)

SIZE = 32
# In pixels: the largest distance of a figure's centre from the image's centre, and half
# the figure's size. Most of every figure survives a crop of 24 x 24 pixels.
MAX_SHIFT = 4
RADII = (6, 10)
# Brightness, 0 to 255: the background, the difference of its corners, the difference of
# figures and squares from the background, and the noise.
LEVELS = (64, 191)
MAX_SLOPE = 60
CONTRASTS = (24, 72)
NOISE = 23
# The percentage of figures in their class's typical colour, and the strength of the
# background's tint, for which each class has a second colour.
TYPICAL = 66
TINTS = (-6, 56)
SQUARES = 2
MAX_SQUARE_RADIUS = 3
# The percentage of training images with the label of another image.
MISLABELLED = 15


def generate(directory: Path) -> None:
    """Writes the synthetic data set to a new folder, completely or not at all.

    Missing parent folders are created. If two processes write the same data set at the
    same time, one of the two equal folders is kept.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
        # A folder in the scratch folder, which only its owner may read.
        unpublished = Path(scratch) / directory.name
        unpublished.mkdir()
        train_files = FORMAT.files("train")
        files = train_files | FORMAT.files("test")
        for seed, (name, count) in enumerate(files.items()):
            mislabelled = count * MISLABELLED // 100 if name in train_files else 0
            content = _records(count, mislabelled, seed).tobytes()
            # Not ndarray.tofile(), which does not report a full disk.
            (unpublished / name).write_bytes(content)
        names = "".join(f"{name}\n" for name in CLASS_NAMES)
        (unpublished / "batches.meta.txt").write_text(names, encoding="utf-8")
        try:
            unpublished.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise


def _records(count: int, mislabelled: int, seed: int) -> np.ndarray:
    """Generates records, uint8 [count, 3073], equally many of each class."""
    random = np.random.RandomState(seed)
    labels = random.permutation(np.arange(count) % len(CLASS_NAMES))
    images = _backgrounds(count, random)
    # Not tinted in the figure's typical colour, so that no colour reveals the class.
    images += _typical_signs(labels >> 1) * _integers(random, *TINTS, (count, 1, 1, 1))
    figures = _figures(labels, random)[:, np.newaxis]  # bool [count, 1, 32, 32]
    images += figures * _colours(labels, random)
    for _ in range(SQUARES):
        squares = _squares(count, random)[:, np.newaxis]
        images += squares * _contrasts(count, random) * _signs(count, random)
    images += _integers(random, -NOISE, NOISE, images.shape)
    pixels = np.clip(images, 0, 255).astype(np.uint8).reshape(count, -1)
    labels[:mislabelled] = random.permutation(labels[:mislabelled])
    return np.concatenate([labels.astype(np.uint8)[:, np.newaxis], pixels], axis=1)


def _backgrounds(count: int, random: np.random.RandomState) -> np.ndarray:
    """Interpolates between random corner colours; int64 [count, 3, 32, 32]."""
    corners = _integers(random, -MAX_SLOPE, MAX_SLOPE, (count, 3, 2, 2))
    near = np.stack([np.arange(SIZE)[::-1], np.arange(SIZE)])  # Weights of both ends.
    slopes = np.einsum("ncij,iy,jx->ncyx", corners, near, near) // (SIZE - 1) ** 2
    return _integers(random, *LEVELS, (count, 3, 1, 1)) + slopes


def _colours(labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Returns each figure's colour minus its background's, int64 [count, 3, 1, 1]."""
    count = len(labels)
    is_typical = _integers(random, 0, 99, (count, 1, 1, 1)) < TYPICAL
    signs = np.where(is_typical, _typical_signs(labels), _signs(count, random))
    # Percentages of the contrast.
    shares = _integers(random, 50, 100, (count, 3, 1, 1))
    return signs * _contrasts(count, random) * shares // 100


def _typical_signs(numbers: np.ndarray) -> np.ndarray:
    """Maps each number's three lowest bits to the signs, 1 or -1, of three channels."""
    bits = numbers[:, np.newaxis] >> np.arange(3) & 1
    return (2 * bits - 1)[:, :, np.newaxis, np.newaxis]


def _contrasts(count: int, random: np.random.RandomState) -> np.ndarray:
    return _integers(random, *CONTRASTS, (count, 1, 1, 1))


def _signs(count: int, random: np.random.RandomState) -> np.ndarray:
    return 2 * _integers(random, 0, 1, (count, 3, 1, 1)) - 1


def _squares(count: int, random: np.random.RandomState) -> np.ndarray:
    """Returns a mask of a small square in each image, bool [count, 32, 32]."""
    shape = (count, 1, 1)
    radius = _integers(random, 1, MAX_SQUARE_RADIUS, shape)
    across = np.arange(SIZE) - _integers(random, 0, SIZE - 1, shape)
    down = np.arange(SIZE)[:, np.newaxis] - _integers(random, 0, SIZE - 1, shape)
    return np.maximum(np.abs(across), np.abs(down)) <= radius


def _figures(labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Returns a mask of the figure in each image, bool [count, 32, 32]."""
    shape = (len(labels), 1, 1)
    radius = _integers(random, *RADII, shape)
    places = np.arange(SIZE) - SIZE // 2
    across = places - _integers(random, -MAX_SHIFT, MAX_SHIFT, shape)
    down = places[:, np.newaxis] - _integers(random, -MAX_SHIFT, MAX_SHIFT, shape)
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
    return np.choose(labels[:, np.newaxis, np.newaxis], by_class)


def _integers(
    random: np.random.RandomState, low: int, high: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Draws int64 numbers from `low` to `high`, both included."""
    # The default dtype, and so the stream, differs between operating systems.
    return random.randint(low, high + 1, shape, dtype=np.int64)
