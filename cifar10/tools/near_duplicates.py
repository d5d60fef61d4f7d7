"""Finds test pictures that are resized, cropped or recoloured training pictures."""

import numpy as np
from PIL import Image

from cifar10.input.dataset_base import Images

# The most bits in which hashes may differ, and the least correlation of pixels. With
# these, 141 test pictures of CIFAR-10 are found, all of which look like a training
# picture (`docs/archive/lab-notes.md`).
_BITS, _CORRELATION = 8, 0.9


def difference_hash(image: np.ndarray) -> int:
    """Hashes an image to 64 bits; each compares the brightness of two grid cells."""
    grey = _grey(image, 9, 8)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes())


def find_pairs(
    train: Images, test: Images, of_train: np.ndarray, of_test: np.ndarray
) -> list[tuple[int, int]]:
    """Returns (index in `train`, index in `test`) for each pair of similar pictures.

    Each test picture is compared with the training picture whose hash is nearest.
    `of_train` and `of_test` are the hashes, uint64 [count].
    """
    pairs = []
    for other, of_one in enumerate(of_test):
        bits = np.bitwise_count(of_train ^ of_one)
        nearest = int(bits.argmin())
        if bits[nearest] <= _BITS:
            looks = train[nearest : nearest + 1], test[other : other + 1]
            if _correlation(*np.concatenate(looks)) > _CORRELATION:
                pairs.append((nearest, other))
    return pairs


def _correlation(*images: np.ndarray) -> float:
    greys = [_grey(image, 32, 32).ravel() for image in images]
    with np.errstate(invalid="ignore"):  # NaN if all pixels are equally bright.
        return float(np.corrcoef(greys)[0, 1])


def _grey(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Returns the mean brightness of an image in each cell of a grid, uint8."""
    small = Image.fromarray(image).convert("L")
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))
