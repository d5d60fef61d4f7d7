"""Test pictures that are nearly a training picture: resized, cropped, recoloured."""

import numpy as np
from PIL import Image

from cifar10.input.dataset_base import Images

# Of CIFAR-10's test pictures 446 have such a hash, and 141 of them such pixels, all of
# which look nearly the same as a training picture (`docs/archive/lab-notes.md`).
_BITS, _CORRELATION = 8, 0.9
_TOGETHER = 64  # Test pictures.


def difference_hash(image: np.ndarray) -> int:
    """Returns 64 bits: which of 8 x 9 cells are brighter than their left neighbours."""
    grey = _grey(image, 9, 8)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes())


def find_pairs(
    train: Images, test: Images, of_train: np.ndarray, of_test: np.ndarray
) -> list[tuple[int, int]]:
    """Returns the places in `train` and `test` of pictures that are nearly the same.

    Each test picture is compared with the training picture of the nearest hash; the
    hashes are uint64 [count].
    """
    pairs = []
    for start in range(0, len(of_test), _TOGETHER):
        bits = np.bitwise_count(of_test[start : start + _TOGETHER, None] ^ of_train)
        places = np.flatnonzero(bits.min(axis=1) <= _BITS)
        found = np.stack([bits[places].argmin(axis=1), start + places], axis=1)
        looks = zip(train[found[:, 0]], test[found[:, 1]], strict=True)
        alike = [_correlation(*two) > _CORRELATION for two in looks]
        pairs += [(one, other) for one, other in found[np.array(alike, bool)].tolist()]
    return pairs


def _correlation(*images: np.ndarray) -> float:
    greys = [_grey(image, 32, 32).astype(float) for image in images]
    # A picture of one brightness has none.
    one, other = ((grey - grey.mean()) / (grey.std() or np.inf) for grey in greys)
    return float((one * other).mean())


def _grey(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Returns the brightness of an image in the cells of a grid, uint8."""
    small = Image.fromarray(image).convert("L")
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))
