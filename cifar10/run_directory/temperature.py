"""The temperature of a checkpoint, by which its logits are divided for probabilities.

With it confidence agrees with accuracy; no prediction changes. From C. Guo et al., On
Calibration of Modern Neural Networks, 2017 (https://arxiv.org/abs/1706.04599).
`eval.py --calibrate` writes it into the checkpoint's folder, where it is kept, copied
and deleted with the weights that it was fitted for.
"""

import math
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar10.errors import UsageError, reason
from cifar10.process import files

_LOWEST, _HIGHEST = 0.05, 20.0  # Beyond, a model is of no use or knows every image.
_GOLDEN = (math.sqrt(5) - 1) / 2


def fit(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature with the least cross entropy, by golden-section search.

    There is a single minimum. Raises a `UsageError` if the images determine none.
    """
    logits = logits.astype(np.float64)

    def loss(temperature: float) -> float:
        entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels, logits / temperature
        )
        return entropies.numpy().mean()

    low, high = _LOWEST, _HIGHEST
    while (width := high - low) > 1e-4:
        first, second = high - _GOLDEN * width, low + _GOLDEN * width
        low, high = (low, second) if loss(first) <= loss(second) else (first, high)
    if not _LOWEST < low < high < _HIGHEST:
        raise UsageError(
            f"No temperature from {_LOWEST:g} to {_HIGHEST:g} fits the {len(labels):,} "
            "val images: the model knows all of them, or none. Use more, or train on."
        )
    return low


def read(path: Path) -> float:
    """Returns the temperature in a file, 1 without one; refuses a damaged file."""
    try:
        if _LOWEST <= (found := float(files.read(path))) <= _HIGHEST:
            return found
        why = "it holds no temperature"
    except FileNotFoundError:
        return 1.0
    except (OSError, ValueError) as error:
        why = reason(error)
    raise UsageError(f"{path} cannot be used: {why}. Delete it, and calibrate again.")
