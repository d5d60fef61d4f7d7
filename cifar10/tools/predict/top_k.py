"""From logits to the names of the likeliest classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cifar10.errors import UsageError


def check(count: int, classes: int) -> None:
    """Refuses a number of classes to name that makes no sense.

    Raises:
        UsageError: There are not as many.
    """
    if not 0 < count <= classes:
        raise UsageError(
            f"top_k {count}: it is at least 1 and at most {classes}, the number of "
            "classes."
        )


def of(
    logits: np.ndarray, class_names: Sequence[str], count: int
) -> list[list[tuple[str, float]]]:
    """Returns the likeliest classes of each image and their probabilities.

    Args:
        logits: floating [images, classes].
        class_names: The names of the classes.
        count: How many classes to name.

    Returns:
        `names[image][rank]`: a name and its probability, the likeliest first.

    Raises:
        UsageError: A logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise UsageError(
            "The model computes logits that are not finite; take the weights of an "
            "earlier step."
        )
    logits = logits.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    return [
        [(class_names[place], float(row[place])) for place in places]
        for row, places in zip(probabilities, ranked, strict=True)
    ]


def as_json(classes: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Returns what `of` says of one image, as an entry of a JSON object."""
    return {
        "predictions": [
            {"class": name, "probability": probability} for name, probability in classes
        ]
    }
