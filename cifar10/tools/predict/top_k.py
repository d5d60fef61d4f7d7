"""From logits to the names of the most likely classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cifar10.errors import UsageError

_DEFAULT = 3


def checked(count: int | None, classes: int) -> int:
    """Returns how many classes to name: `count`, or by default up to three.

    Raises:
        UsageError: There are fewer classes, or none is to be named.
    """
    if count is None:
        return min(_DEFAULT, classes)
    if not 0 < count <= classes:
        raise UsageError(
            f"top_k {count}: it is at least 1 and at most {classes}, the number of "
            "classes."
        )
    return count


def top_k(
    logits: np.ndarray, class_names: Sequence[str], count: int
) -> list[list[dict[str, Any]]]:
    """Returns the `count` most likely classes of each image with their probabilities.

    `logits` are floating [images, classes]. The result is ready for JSON,
    `ranked[image][rank]`: a `class` and its `probability`, the most likely class first.
    """
    if not np.isfinite(logits).all():
        raise UsageError(
            "The model computes logits that are not finite; use an earlier checkpoint."
        )
    logits = logits.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    return [
        [{"class": class_names[i], "probability": float(row[i])} for i in indices]
        for row, indices in zip(probabilities, ranked, strict=True)
    ]
