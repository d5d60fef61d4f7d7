"""Divides images into training, test and `val` splits, by hashes of their names.

Each class is divided separately. Images with hashes below a limit are the test split,
those below a second limit the `val` split, and all others the training split. The
division is the same on every machine, and adding images moves few of the others.
"""

import dataclasses
import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cifar10.input.corrections import regrouped
from cifar10.input.dataset_base import Dataset
from cifar10.input.records import Split

# The settings that hold the fractions of the splits.
_FRACTIONS = {"test": "validation_fraction", "val": "val_fraction"}


def divided(
    names: Iterable[str],
    labels: np.ndarray,
    classes: Sequence[str],
    shares: Mapping[Split, float],
    run: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, str]:
    """Divides images into splits, by hashes of their names.

    A run records the hash limits of its splits in `config.json`, and uses them again
    after images are added. So no training image of the run is ever scored, nor does a
    run that begins with its weights train on an image that it held out.

    Args:
        names: The names of the images, such as paths.
        labels: The labels of the images.
        classes: The names of the classes.
        shares: The fraction of images for each split except the training split. New
            limits give each class a training image, and if possible one in each split.
        run: The `config.json` of a run whose limits are used again, for classes that it
            has, and splits with an equal fraction.

    Returns:
        The split of each image, str [count], and the division to record: for each split
        the limits of all classes, 16 hexadecimal digits each.
    """
    hashes = np.array([*map(_hash_of, names)], np.uint64)
    ordered = hashes[np.lexsort((hashes, labels))]
    ends = np.cumsum(np.bincount(labels, minlength=len(classes)))
    of_classes = np.split(ordered, ends[:-1])
    wanted = [*shares.values()]
    limits = np.array([_limits(some, wanted) for some in of_classes], np.uint64).T
    division, there = (run or {}).get("data_division"), (run or {}).get("class_names")
    if run and division and there and len(division) % (16 * len(there)) == 0:
        earlier = np.frombuffer(bytes.fromhex(division), ">u8").reshape(-1, len(there))
        places = {name: place for place, name in enumerate(there)}
        both = [place for place, name in enumerate(classes) if name in places]
        others = [places[classes[place]] for place in both]
        for row, (split, share) in enumerate([*shares.items()][: len(earlier)]):
            if run.get(_FRACTIONS[split], share) == share:
                limits[row, both] = earlier[row, others]
    parts = np.full(len(hashes), "train")
    for split, of_part in [*zip(shares, limits, strict=True)][::-1]:
        parts[hashes < of_part[labels]] = split
    return parts, limits.astype(">u8").tobytes().hex()


def with_val(dataset: Dataset, fraction: float) -> Dataset:
    """Holds out a fraction of the training split as `val`, unless there is a `val`."""
    if not fraction or "val" in dataset.parts or "train" not in dataset.parts:
        return dataset
    _, labels = dataset.read("train")
    numbers = map(str, range(len(labels)))  # Instead of names.
    of_images, _ = divided(numbers, labels, dataset.class_names, {"val": fraction})
    parts: tuple[Split, ...] = ("train", "val", *dataset.parts[1:])
    places = {part: np.flatnonzero(of_images == part) for part in parts[:2]}
    return dataclasses.replace(regrouped(dataset, places, labels), parts=parts)


def _limits(hashes: np.ndarray, shares: Sequence[float]) -> list[int]:
    """Returns the upper hash limit of each split, from the sorted hashes of a class."""
    found, taken = [], 0
    for share in shares:
        # One image at least, unless none would remain to train on.
        count = min(max(1, int(share * len(hashes) + 0.5)), len(hashes) - 1 - taken)
        taken += max(count, 0) if share else 0
        found.append(int(hashes[taken - 1]) + 1 if taken else 0)
    return found


def _hash_of(name: str) -> int:
    """Returns a 64-bit hash of a name."""
    # File systems store accents in one of two Unicode forms.
    name = name if name.isascii() else unicodedata.normalize("NFC", name)
    content = name.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])
