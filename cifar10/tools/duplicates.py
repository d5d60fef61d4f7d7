"""Finds pictures of a data set that are equal, and test pictures like training ones."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from cifar10.input.dataset_base import Images
from cifar10.input.records import Split

# Images and labels of each split, the training split first.
Parts: TypeAlias = Mapping[Split, tuple[Images, np.ndarray]]

_READ_BYTES = 2**26  # Images are read in pieces, since all may not fit in memory.

# The most bits in which the hashes of similar pictures may differ, and the least
# correlation of their pixels. With these, 141 test pictures of CIFAR-10 are found, all
# of which look like a training picture (`docs/archive/lab-notes.md`).
_BITS, _CORRELATION = 8, 0.9


def find_duplicates(parts: Parts, names: Sequence[str]) -> dict[str, Any]:
    """Finds prepared pictures that are equal pixel for pixel, or nearly equal.

    Args:
        parts: Images and labels of each split, the training split first.
        names: The names of all pictures, in the order of the splits.

    Returns:
        `groups`: the names of the pictures in each group of equal pictures.
        `in_both_parts`: the number of held-out pictures that equal a training picture.
        `in_several_classes`: the number of groups whose pictures have different labels.
        `nearly`: pairs of a training picture and a nearly equal held-out picture.
    """
    labels = np.concatenate([labels for _, labels in parts.values()])
    trained = len(parts["train"][1])
    digests, hashes = [], []
    for images, _ in parts.values():
        for image in _one_by_one(images):
            digests.append(hashlib.blake2b(image.tobytes(), digest_size=16).digest())
            hashes.append(difference_hash(image))
    places = defaultdict(list)
    for place, digest in enumerate(digests):
        places[digest].append(place)
    groups = [group for group in places.values() if len(group) > 1]
    mixed = [group for group in groups if len(np.unique(labels[group])) > 1]
    leaked = [
        place
        for group in groups
        if group[0] < trained
        for place in group
        if place >= trained
    ]
    nearly = [
        [names[one], names[other]]
        for one, other in _similar(parts, np.array(hashes, np.uint64))
        if digests[one] != digests[other]
    ]
    return {
        "groups": [[names[place] for place in group] for group in groups],
        "in_both_parts": len(leaked),
        "in_several_classes": len(mixed),
        "nearly": nearly,
    }


def _one_by_one(images: Images) -> Iterator[np.ndarray]:
    step = max(1, _READ_BYTES * len(images) // max(1, images.nbytes))
    for start in range(0, len(images), step):
        yield from images[start : start + step]


def difference_hash(image: np.ndarray) -> int:
    """Hashes an image to 64 bits; each compares the brightness of two grid cells."""
    grey = _grey(image, 9, 8)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes())


def _similar(parts: Parts, hashes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the places of a training picture and a held-out picture that is similar.

    Each held-out picture is compared with the training picture whose hash is nearest.
    """
    train, _ = parts["train"]
    first = len(train)
    for images, _ in [*parts.values()][1:]:
        for place, image in enumerate(_one_by_one(images), first):
            bits = np.bitwise_count(hashes[: len(train)] ^ hashes[place])
            nearest = int(bits.argmin())
            if bits[nearest] <= _BITS:
                (other,) = train[nearest : nearest + 1]
                if _correlation(image, other) > _CORRELATION:
                    yield nearest, place
        first += len(images)


def _correlation(*images: np.ndarray) -> float:
    greys = [_grey(image, 32, 32).ravel() for image in images]
    with np.errstate(invalid="ignore"):  # NaN if all pixels are equally bright.
        return float(np.corrcoef(greys)[0, 1])


def _grey(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Returns the mean brightness of an image in each cell of a grid, uint8."""
    small = Image.fromarray(image).convert("L")
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))
