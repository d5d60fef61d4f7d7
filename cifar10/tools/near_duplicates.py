"""Finds test pictures that are a training picture resized, cropped or recoloured."""

import numpy as np
from PIL import Image

from cifar10.input.dataset_base import Images

# Of CIFAR-10's test pictures 446 are as near as this by hash, and 141 of them by pixels
# too; these 141 all look like a training picture (`docs/archive/lab-notes.md`).
_BITS, _CORRELATION = 8, 0.9


def difference_hash(image: np.ndarray) -> int:
    """Returns 64 bits: which of 8 x 9 cells are brighter than their left neighbours."""
    grey = _grey(image, 9, 8)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes())


def find_pairs(
    train: Images, test: Images, of_train: np.ndarray, of_test: np.ndarray
) -> list[tuple[int, int]]:
    """Returns the indices in `train` and `test` of pictures that are nearly the same.

    Each test picture is compared with the training picture of the nearest hash; the
    hashes are uint64 [count].
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
    with np.errstate(invalid="ignore"):  # A picture of one brightness has none: NaN.
        return float(np.corrcoef(greys)[0, 1])


def _grey(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Returns the brightness of an image in the cells of a grid, uint8."""
    small = Image.fromarray(image).convert("L")
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))
