"""Compares what an export computes with what the model of the run computes."""

from typing import NamedTuple

import numpy as np

# The largest difference, relative to the largest value: summing in another order stays
# below a third of it.
_TOLERANCE = 1e-5
# The part of the images by which int8 may classify fewer correctly: it loses less than
# a point where ranges were estimated well (https://arxiv.org/abs/2004.09602).
_MOST_LOST = 0.01


class Verdict(NamedTuple):
    """Whether an export may be kept, what was found, and what the limit was."""

    passed: bool
    finding: str
    limit: str


def of_values(computed: np.ndarray, expected: np.ndarray, name: str) -> Verdict:
    """Compares float32 [images, classes]: rounding may be all that differs."""
    difference = float("inf")
    if computed.shape == expected.shape:
        difference = float(np.abs(computed - expected).max() / np.abs(expected).max())
    return Verdict(
        difference <= _TOLERANCE,  # False for NaN.
        f"differs by\n        {difference:.1e} of the largest of the {name}",
        f"at most {_TOLERANCE:.0e}",
    )


def of_precisions(
    computed: np.ndarray, expected: np.ndarray, labels: np.ndarray
) -> Verdict:
    """Compares how many images logits classify correctly, with int8 and float32.

    The logits are float32 [images, classes], the labels integers [images].
    """
    ours = int(np.count_nonzero(expected.argmax(axis=1) == labels))
    correct, is_finite = 0, computed.shape == expected.shape
    if is_finite:
        correct = int(np.count_nonzero(computed.argmax(axis=1) == labels))
        is_finite = bool(np.isfinite(computed).all())
    most = max(1, int(_MOST_LOST * len(labels)))
    return Verdict(
        is_finite and ours - correct <= most,
        f"has\n        precision @ 1 = {correct / len(labels):.4f} in int8, and the "
        f"run's model\n        {ours / len(labels):.4f} in float32",
        f"int8 may lose {most:,} images",
    )
