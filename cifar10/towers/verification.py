"""`--verify_steps`: computes a step's gradients twice, on two devices if possible.

This reveals faulty processors, which can return wrong results without an error (Meta,
arXiv 2102.11245; Google, "Cores that don't count", HotOS 2021).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cifar10.errors import NotFiniteError
from cifar10.towers.towers import Batch, StepResult, TowerBuilder

# Largest difference due to rounding, relative to the norm, where results need not be
# equal bit for bit (docs/auditing.md).
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.05}


class CorruptedError(NotFiniteError):
    """Two devices have computed different gradients from the same batch."""


def verify_step(
    towers: TowerBuilder, batches: Sequence[Batch], step: int, bound: float
) -> StepResult:
    """Runs a step, and checks the gradients of each tower on another tower's device.

    If there is only one tower, its gradients are checked on its own device. The checked
    gradients are those that the step has applied.

    Args:
        towers: The builder that runs the step.
        batches: One batch per tower.
        step: The number of the step, for messages.
        bound: Largest permitted difference, relative to the norm of a gradient.

    Raises:
        CorruptedError: A difference exceeds `bound`. The step has been undone.
    """
    devices = towers.devices
    of_each = len(devices) // len({*devices})  # Batches per device.
    elsewhere = devices[of_each:] + devices[:of_each]
    variables = towers.state.variables()
    before = [variable.read_value() for variable in variables]
    again = towers.results(batches, elsewhere)
    # Gradients of the step itself: another graph would round them differently.
    result = towers.step(batches, with_results=True)
    names = [variable.path for variable in towers.state.model.trainable_variables]
    for tower, pair in enumerate(zip(result.results, again, strict=True)):
        both = (of_tower.gradients for of_tower in pair)
        for name, ours, theirs in zip(names, *both, strict=True):
            far = 0.0 if ours is None else proportion(ours, theirs)
            if far <= bound:
                continue
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            raise CorruptedError(
                step,
                f"the gradient of {name} on tower {tower} "
                f"({towers.tower_names[tower]}) differs from the same gradient on "
                f"{elsewhere[tower]} by {far:.2g} of the norm: one of these devices "
                "computes wrongly",
            )
    return result


def proportion(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
    """Returns the norm of the arrays' difference, divided by the larger of their norms.

    The result is 0 to 2. Arrays that differ give 2 if they are integers or not finite.
    """
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    is_rounded = ours.dtype.kind not in "iub"
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if np.array_equal(ours, theirs, equal_nan=True):
        return 0.0
    with np.errstate(all="ignore"):
        size = np.maximum(np.linalg.norm(ours), np.linalg.norm(theirs))
        found = np.linalg.norm(ours - theirs) / size
    return float(found) if is_rounded and np.isfinite(found) else 2.0
