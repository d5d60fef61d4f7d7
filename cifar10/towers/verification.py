"""`--verify_steps`: computes a step's gradients on two devices, if there are two.

This reveals faulty processors, which can return wrong results without an error (Meta,
arXiv 2102.11245; Google, "Cores that don't count", HotOS 2021).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cifar10.errors import NotFiniteError
from cifar10.towers.towers import Batch, TowerBuilder

# How far rounding moves one computation, relative to its norm; docs/auditing.md has the
# measurements.
ROUNDING = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}


class CorruptedError(NotFiniteError):
    """Two devices have computed different gradients from the same batch."""


def verify(
    towers: TowerBuilder, batches: Sequence[Batch], step: int, bound: float
) -> None:
    """Computes the gradients of the next step on each tower's device and on another's.

    With a single device, computes them twice on this device. Does not run the step.

    Raises:
        CorruptedError: The gradients of a variable differ by more than `bound`.
    """
    devices = towers.devices
    of_each = len(devices) // len({*devices})  # Batches per device.
    elsewhere = devices[of_each:] + devices[:of_each]
    names = [variable.path for variable in towers.state.model.trainable_variables]
    both = towers.results(batches), towers.results(batches, elsewhere)
    for tower, pair in enumerate(zip(*both, strict=True)):
        gradients = (result.gradients for result in pair)
        for name, ours, theirs in zip(names, *gradients, strict=True):
            far = 0.0 if ours is None else relative_difference(ours, theirs)
            if far > bound:
                raise CorruptedError(
                    step,
                    f"the gradient of {name} on tower {tower} "
                    f"({towers.tower_names[tower]}) differs from the same gradient on "
                    f"{elsewhere[tower]} by {far:.2g} of the norm: one of these "
                    "devices computes wrongly",
                )


def relative_difference(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
    """Returns the norm of two arrays' difference, divided by the larger of their norms.

    The result is 0 to 2. Arrays that differ and are not finite give 2.
    """
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if np.array_equal(ours, theirs, equal_nan=True):
        return 0.0
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(all="ignore"):
        size = max(np.linalg.norm(ours), np.linalg.norm(theirs))
        return float(np.nan_to_num(np.linalg.norm(ours - theirs) / size, nan=2.0))
