"""Temperature scaling: divides logits so that confidence agrees with accuracy.

Predictions do not change. See C. Guo et al., On Calibration of Modern Neural Networks,
2017 (https://arxiv.org/abs/1706.04599). `eval.py --calibrate` writes the temperature
into the checkpoint's folder, where it is copied and deleted together with the weights.
"""

from bisect import bisect_left
from pathlib import Path

import numpy as np

from cifar10 import files
from cifar10.errors import UsageError, reason

FILES = ("temperature.txt", "temperature_raw.txt")  # For averages; for last values.
_LOWEST, _HIGHEST = 0.05, 20.0  # Beyond, a model knows all images or none.
ROUNDING = 0.013  # Relative: two of the steps below, by which rounding may move a fit.


@np.errstate(invalid="ignore")  # No temperature fits values that are not finite.
def fit(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature with the least cross entropy, refusing the extremes."""
    ahead = logits.astype(np.float64) - logits[np.arange(len(labels)), labels, None]
    candidates = np.geomspace(_LOWEST, _HIGHEST, 1000)  # In steps of 0.6 %.

    def entropy(at: int) -> float:
        return np.logaddexp.reduce(ahead / candidates[at], axis=1).mean()

    # Convex in the temperature's inverse, it has one minimum.
    steps = range(len(candidates) - 1)
    best = bisect_left(steps, True, key=lambda at: entropy(at) <= entropy(at + 1))
    if best in (0, len(candidates) - 1):
        raise UsageError(
            f"No temperature from {_LOWEST:g} to {_HIGHEST:g} fits the {len(labels):,} "
            "val images. Use more images, or train longer."
        )
    return float(candidates[best])


def read(path: Path) -> float:
    """Returns a file's temperature, or 1 without a file; refuses a damaged file."""
    try:
        text = files.read(path).decode()  # `float` would read 2_0 as 20.
        if _LOWEST <= (found := float(text.replace("_", "?"))) <= _HIGHEST:
            return found
        why = "it holds no temperature"
    except FileNotFoundError:
        return 1.0
    except (OSError, ValueError) as error:
        why = reason(error)
    fix = "Delete the file, or calibrate again."
    raise UsageError(f"{path} cannot be used: {why}. {fix}")
