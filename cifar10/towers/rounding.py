"""How far the results of equal computations may differ, and how far they do."""

from typing import Any

import numpy as np

# How far rounding moves gradients and scores: ten times what docs/auditing.md measured.
ROUNDING = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}


def relative_difference(ours: Any, theirs: Any) -> float:
    """Returns a difference's norm over the larger norm, 0 to 2; 2 if not finite."""
    if np.array_equal(ours, theirs) or np.array_equal(ours, theirs, equal_nan=True):
        return 0.0
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    with np.errstate(all="ignore"):
        size = max(np.linalg.norm(ours), np.linalg.norm(theirs))
        return float(np.nan_to_num(np.linalg.norm(ours - theirs) / size, nan=2.0))
