"""Recognizes a run's training images among others, by digests of a few of them.

Paths and fingerprints of whole data sets do not tell a copy with one more picture, or a
folder that has moved and was corrected, from other data.
"""

import hashlib
from collections.abc import Collection

import numpy as np

from cifar10.input.dataset_base import Images

# A thirtieth of the training images is then found with a probability of 0.9.
_COUNT = 64
_BLOCK = 1024  # Images that are read from disk at once.


def sampled(images: Images) -> list[str]:
    """Returns the digests of up to 64 images, evenly spread, without repetitions."""
    chosen = np.linspace(0, len(images) - 1, _COUNT).astype(int)
    return sorted(_digests(images[np.unique(chosen)]))


def found_among(images: Images, sample: Collection[str], most: int | None) -> set[str]:
    """Returns the digests in `sample` of some of the images, at `most` the first."""
    end = min(most or len(images), len(images))
    blocks = (images[at : min(at + _BLOCK, end)] for at in range(0, end, _BLOCK))
    return {digest for block in blocks for digest in _digests(block) & {*sample}}


def _digests(images: np.ndarray) -> set[str]:
    # Images of one colour, such as blank pages, may be equal by chance.
    some = (one.tobytes() for one in images if (one != one[:1, :1]).any())
    return {hashlib.blake2b(one, digest_size=8).hexdigest() for one in some}
