"""The division of images into parts, by hashes of their names.

Each class is divided by itself: the images whose names have the lowest hashes, below a
limit, are the test part, and those up to a second limit the part `val`. So the division
is the same on every machine, and images that are added move few others.
"""

import dataclasses
import hashlib
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cifar10.input.corrections import names_of
from cifar10.input.dataset_base import Dataset, Images, selected
from cifar10.input.records import Split

# How a run of an older version was divided: by one limit for all classes.
BY_FRACTION = ""


def divided(
    names: Iterable[str],
    labels: np.ndarray,
    classes: int,
    shares: Mapping[Split, float],
    division: str | None = None,
) -> tuple[np.ndarray, str]:
    """Divides images into parts.

    A run keeps its limits in `config.json`, so that no image that it was trained on is
    ever scored, whatever was added since.

    Args:
        names: The names of the images, such as the paths of pictures.
        labels: Their classes, from 0 on.
        classes: How many classes there are.
        shares: The shares of the parts that are divided off. A class has at least one
            image in each, if its images suffice, and one to train on.
        division: That of a run, or `BY_FRACTION`; None to divide anew, as happens
            if the classes are not those of the run.

    Returns:
        The part of each image, str [count], and the division as a run keeps it: for
        each part the limits of all classes, each 16 hexadecimal digits.
    """
    hashes = np.array([*map(_hash_of, names)], np.uint64)
    if division == BY_FRACTION:
        most = 2**64 - 1
        limit = min(math.ceil(shares["test"] * 2**64), most)
        limits = np.full((1, classes), limit, np.uint64)
    elif division and len(division) == 16 * classes * len(shares):
        limits = np.frombuffer(bytes.fromhex(division), ">u8").astype(np.uint64)
        limits = limits.reshape(len(shares), classes)
    else:
        ordered = hashes[np.lexsort((hashes, labels))]
        ends = np.cumsum(np.bincount(labels, minlength=classes))
        of_classes = np.split(ordered, ends[:-1])
        wanted = [*shares.values()]
        limits = np.array([_limits(some, wanted) for some in of_classes], np.uint64).T
    parts = np.full(len(hashes), "train")
    for split, of_part in [*zip(shares, limits, strict=False)][::-1]:
        parts[hashes < of_part[labels]] = split
    return parts, limits.astype(">u8").tobytes().hex()


def with_val(dataset: Dataset, fraction: float) -> Dataset:
    """Returns a data set with that fraction of its training part held out as `val`.

    It is the data set itself if it has such a part or nothing to train on, or the
    fraction is 0.
    """
    if not fraction or "val" in dataset.parts or "train" not in dataset.parts:
        return dataset

    _, labels = dataset.read("train")
    numbers = map(str, range(len(labels)))  # In place of names.
    of_images, _ = divided(numbers, labels, dataset.classes, {"val": fraction})
    names = names_of(dataset, "train", len(labels))
    parts: tuple[Split, ...] = ("train", "val", *dataset.parts[1:])
    places = {part: np.flatnonzero(of_images == part) for part in parts[:2]}
    paths = {part: [names[n] for n in of.tolist()] for part, of in places.items()}

    def read(split: Split) -> tuple[Images, np.ndarray]:
        if split not in places:
            return dataset.read(split)
        images, labels = dataset.read("train")
        return selected(images, places[split]), labels[places[split]]

    return dataclasses.replace(
        dataset, read=read, parts=parts, paths={**dataset.paths, **paths}
    )


def _limits(hashes: np.ndarray, shares: Sequence[float]) -> list[int]:
    """Returns for each part a limit: lower hashes are in it or an earlier part.

    A part with a share has one image at least; one is left to train on.
    """
    found, taken = [], 0
    for share in shares:
        count = min(max(1, int(share * len(hashes) + 0.5)), len(hashes) - 1 - taken)
        taken += max(count, 0) if share else 0
        found.append(int(hashes[taken - 1]) + 1 if taken else 0)
    return found


def _hash_of(name: str) -> int:
    """Returns 64 bits that depend on a name alone."""
    # File systems write accents in two ways.
    name = name if name.isascii() else unicodedata.normalize("NFC", name)
    content = name.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])
