"""What a data set consists of: its classes, and pictures that are there twice."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from cifar10.input.datasets import Dataset, Images
from cifar10.input.pictures.dataset import PreparedDataset
from cifar10.input.records import SPLITS, Split

_READ_BYTES = 2**26  # Of images at a time, as not all of them need fit in memory.
_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Pictures whose prepared pixels are the same."""

    groups: Sequence[Sequence[str]]  # The names of those that are the same.
    repeated: int  # Pictures beyond the first of each group.
    in_both_parts: int  # Test pictures that are training pictures too.
    in_several_classes: int  # Groups whose pictures are of several classes.


@dataclasses.dataclass(frozen=True)
class Part:
    """The pictures of one split."""

    images: Images
    labels: np.ndarray  # int32 [count].
    names: Sequence[str]


def parts(dataset: Dataset) -> dict[Split, Part]:
    """Reads both parts of a data set."""
    return {split: _part(dataset, split) for split in SPLITS}


def _part(dataset: Dataset, split: Split) -> Part:
    images, labels = dataset.read(split)
    if isinstance(dataset, PreparedDataset):
        return Part(images, labels, dataset.prepared.paths(split))
    names = [f"{split} picture {number}" for number in range(len(images))]
    return Part(images, labels, names)


def duplicates(found: dict[Split, Part]) -> Duplicates:
    """Finds the pictures that are the same to the last pixel, once they are prepared.

    They are compared by a hash of 128 bits.
    """
    digests = np.concatenate([_digests(found[split].images) for split in SPLITS])
    labels = np.concatenate([found[split].labels for split in SPLITS])
    trained = len(found["train"].labels)
    _, content, times = np.unique(
        digests, axis=0, return_inverse=True, return_counts=True
    )
    content = content.reshape(-1)
    several = np.flatnonzero(times[content] > 1)
    by_content = several[np.argsort(content[several], kind="stable")]
    ends = np.flatnonzero(np.diff(content[by_content])) + 1
    groups = np.split(by_content, ends) if several.size else []
    groups = sorted(groups, key=lambda group: int(group[0]))
    names = [
        [
            found["train"].names[place]
            if place < trained
            else found["test"].names[place - trained]
            for place in group.tolist()
        ]
        for group in groups
    ]
    return Duplicates(
        groups=names,
        repeated=sum(len(group) - 1 for group in groups),
        in_both_parts=sum(
            int((group >= trained).sum()) for group in groups if group[0] < trained
        ),
        in_several_classes=sum(
            len(set(labels[group].tolist())) > 1 for group in groups
        ),
    )


def _digests(images: Images) -> np.ndarray:
    """Returns a hash of each image, uint64 [count, 2]."""
    step = max(1, _READ_BYTES * len(images) // max(1, images.nbytes))
    digests = bytearray()
    for start in range(0, len(images), step):
        for image in np.ascontiguousarray(images[start : start + step]):
            digests += hashlib.blake2b(image, digest_size=_DIGEST_BYTES).digest()
    return np.frombuffer(bytes(digests), np.uint64).reshape(-1, 2)
