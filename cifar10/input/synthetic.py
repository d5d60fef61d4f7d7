"""The stand-in: generated images in CIFAR-10's own binary format.

It is for trying things out where CIFAR-10 is not available, and for tests. Accuracy on
it says nothing about CIFAR-10.

Each of the ten classes is a figure, drawn with a random position, size and contrast on
a background that changes from corner to corner, among small squares and noise. Colours
are random, but biased to one per class: a linear model gets less than three images of
five right, and a faint figure in another colour is hard to see for any model. So, as in
photographs, something can be learned from the first steps on and something is left for
the last. And some training images have a wrong label, so that certainty never pays.
Without the bias the tutorial's recipe learns nothing for hundreds of steps and then
everything at once; without wrong labels its loss jumps (`docs/archive/lab-notes.md`).

The bytes are the same on every machine: everything is integer arithmetic on the stream
of `numpy.random.RandomState`, which NumPy promises never to change.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from cifar10.input import records

# The number is the version of the generator. A change of the bytes must raise it, so
# that a folder of an older version is never mistaken for the new one.
FOLDER = "synthetic-v3"

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
    class_names=CLASS_NAMES,
)

SIZE = 32
# Largest distance of a figure's centre from the image's, and half the figure's size, in
# pixels: most of every figure survives a crop of 24 x 24 pixels.
MAX_SHIFT = 4
MIN_RADIUS = 6
MAX_RADIUS = 10
# Brightness, of 0 to 255. A background lies at one level, its four corners above or
# below; a figure or a square lies above or below its background.
LEVELS = (64, 191)
MAX_SLOPE = 60
CONTRASTS = (24, 72)
NOISE = 23
# Percentage of figures in their class's colour, and how far a background leans towards
# the second colour of its class.
TYPICAL = 66
TINTS = (-6, 56)
SQUARES = 2
MAX_SQUARE_RADIUS = 3
# Percentage of training images that have the label of another one.
MISLABELLED = 15


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
    """Returns records with equally many labels of each class, uint8 [count, 3073].

    The first `mislabelled` of them have exchanged their labels.
    """
    random = np.random.RandomState(seed)
    labels = random.permutation(np.arange(count) % len(CLASS_NAMES))
    images = _backgrounds(count, random)
    # Not in the figure's colour, so that a colour alone does not give the class away.
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
    """Interpolates images between random corner colours, int64 [count, 3, 32, 32]."""
    corners = _integers(random, -MAX_SLOPE, MAX_SLOPE, (count, 3, 2, 2))
    near = np.stack([np.arange(SIZE)[::-1], np.arange(SIZE)])  # To each end of a side.
    slopes = np.einsum("ncij,iy,jx->ncyx", corners, near, near) // (SIZE - 1) ** 2
    return _integers(random, *LEVELS, (count, 3, 1, 1)) + slopes


def _colours(labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Returns how much brighter the figures are, int64 [count, 3, 1, 1]."""
    count = len(labels)
    is_typical = _integers(random, 0, 99, (count, 1, 1, 1)) < TYPICAL
    signs = np.where(is_typical, _typical_signs(labels), _signs(count, random))
    # Of the contrast, in percent.
    shares = _integers(random, 50, 100, (count, 3, 1, 1))
    return signs * _contrasts(count, random) * shares // 100


def _typical_signs(numbers: np.ndarray) -> np.ndarray:
    """Returns 1 for the channels whose bits are set in numbers, -1 for the others."""
    bits = numbers[:, np.newaxis] >> np.arange(3) & 1
    return (2 * bits - 1)[:, :, np.newaxis, np.newaxis]


def _contrasts(count: int, random: np.random.RandomState) -> np.ndarray:
    return _integers(random, *CONTRASTS, (count, 1, 1, 1))


def _signs(count: int, random: np.random.RandomState) -> np.ndarray:
    return 2 * _integers(random, 0, 1, (count, 3, 1, 1)) - 1


def _squares(count: int, random: np.random.RandomState) -> np.ndarray:
    """Returns which pixels belong to one small square each, bool [count, 32, 32]."""
    shape = (count, 1, 1)
    radius = _integers(random, 1, MAX_SQUARE_RADIUS, shape)
    across = np.arange(SIZE) - _integers(random, 0, SIZE - 1, shape)
    down = np.arange(SIZE)[:, np.newaxis] - _integers(random, 0, SIZE - 1, shape)
    return np.maximum(np.abs(across), np.abs(down)) <= radius


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
    return np.choose(labels[:, np.newaxis, np.newaxis], by_class)


def _integers(
    random: np.random.RandomState, low: int, high: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns int64 numbers from `low` to `high`, both included."""
    # The default type, and with it the stream, differs between operating systems.
    return random.randint(low, high + 1, shape, dtype=np.int64)
