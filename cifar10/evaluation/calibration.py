"""The temperature by which logits are divided so that confidence tells accuracy.

No prediction changes. From C. Guo et al., On Calibration of Modern Neural Networks,
2017 (https://arxiv.org/abs/1706.04599), like the expected calibration error.
"""

import math

import numpy as np

from cifar10.errors import UsageError
from cifar10.run_directory.temperature import HIGHEST, LOWEST

_BINS = 15  # As many as in the paper.
_GOLDEN = (math.sqrt(5) - 1) / 2


def in_bins(confidence: np.ndarray, is_right: np.ndarray) -> np.ndarray:
    """Sums up images in bins of equal width, by the probability of their prediction.

    Returns:
        float64 [3, 15]: the images of each bin, those that are right, and the sum of
        their confidences.
    """
    confidence = np.nan_to_num(confidence)  # Of logits that are not finite: none.
    places = np.clip(np.ceil(confidence * _BINS).astype(int) - 1, 0, _BINS - 1)
    of_each = np.ones(len(places)), is_right, confidence
    return np.stack([np.bincount(places, one, _BINS) for one in of_each])


def at_temperature(
    logits: np.ndarray, labels: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns cross entropy and confidence, [images], of logits, [images, classes]."""
    values = (logits - logits.max(axis=1, keepdims=True)) / temperature
    sums = np.exp(values).sum(axis=1)
    return np.log(sums) - values[np.arange(len(labels)), labels], 1 / sums


def fit(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature with the least cross entropy, by golden sections.

    It has no other minimum. Raises a `UsageError` if the images determine none.
    """
    logits = logits.astype(np.float64)

    def loss(temperature: float) -> float:
        return at_temperature(logits, labels, temperature)[0].mean()

    low, high = LOWEST, HIGHEST
    while (width := high - low) > 1e-4:
        first, second = high - _GOLDEN * width, low + _GOLDEN * width
        low, high = (low, second) if loss(first) <= loss(second) else (first, high)
    if not LOWEST < low < high < HIGHEST:
        raise UsageError(
            f"No temperature from {LOWEST:g} to {HIGHEST:g} fits the {len(labels):,} "
            "val images: the model knows all of them, or none. Use more, or train on."
        )
    return low
