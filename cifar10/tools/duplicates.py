"""Finds equal pictures in a data set, and near duplicates of training pictures."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from cifar10.input.dataset_base import Images
from cifar10.input.records import Split

# Images and labels of each split, the training split first.
Splits: TypeAlias = Mapping[Split, tuple[Images, np.ndarray]]

_READ_BYTES = 2**26  # Images are read in pieces, since all may not fit in memory.

# Pictures are similar if the changes of brightness between neighbouring cells of a grid
# correlate. With these values 206 test pictures of CIFAR-10 are found, nearly all of
# which show the same as a training picture (`dev/LOG.md`).
_GRID, _CORRELATION = 9, 0.9
_BLOCK = 64  # Held-out pictures that are compared at a time.


def find_duplicates(splits: Splits, names: Sequence[str]) -> dict[str, Any]:
    """Finds prepared pictures that are equal pixel for pixel, or nearly equal.

    `names` has the names of all pictures, in the order of the splits.

    Returns:
        `groups`: the names of the pictures in each group of equal pictures.
        `in_both_parts`: the number of held-out pictures that equal a training picture.
        `in_several_classes`: the number of groups whose pictures have different labels.
        `nearly`: pairs of a training picture and a nearly equal held-out picture.
    """
    labels = np.concatenate([labels for _, labels in splits.values()])
    trained = len(splits["train"][1]) if "train" in splits else 0
    digests, changes = [], []
    for images, _ in splits.values():
        step = max(1, _READ_BYTES * len(images) // max(1, images.nbytes))
        chunks = (images[at : at + step] for at in range(0, len(images), step))
        for image in itertools.chain.from_iterable(chunks):
            digests.append(hashlib.blake2b(image.tobytes(), digest_size=16).digest())
            changes.append(_changes(image))
    indices = defaultdict(list)
    for index, digest in enumerate(digests):
        indices[digest].append(index)
    groups = [group for group in indices.values() if len(group) > 1]
    shared = [index for group in groups if group[0] < trained for index in group]
    return {
        "groups": [[names[index] for index in group] for group in groups],
        "in_both_parts": sum(index >= trained for index in shared),
        "in_several_classes": sum(len({*labels[group]}) > 1 for group in groups),
        "nearly": [
            [names[one], names[other]]
            for one, other in _similar(np.array(changes), trained)
            if digests[one] != digests[other]
        ],
    }


def _changes(image: np.ndarray) -> np.ndarray:
    """Returns an image's changes of brightness, whose dot products are correlations."""
    grey = Image.fromarray(image).convert("L")
    grid = np.asarray(grey.resize((_GRID, _GRID), Image.Resampling.BOX), np.float32)
    changes = np.concatenate([np.diff(grid, axis=axis).ravel() for axis in (0, 1)])
    changes -= changes.mean()
    return changes / (np.linalg.norm(changes) or 1.0)


def _similar(changes: np.ndarray, trained: int) -> Iterator[tuple[int, int]]:
    """Yields the indices of a training and a held-out picture that are similar."""
    for first in range(trained, len(changes) if trained else 0, _BLOCK):
        correlations = changes[first : first + _BLOCK] @ changes[:trained].T
        for index, of_index in enumerate(correlations, first):
            if of_index.max() > _CORRELATION:
                yield int(of_index.argmax()), index
