"""`--verify_steps` computes the gradients of a step twice, on different devices.

A processor that sometimes computes wrongly says nothing of it (Meta, arXiv 2102.11245;
Google, "Cores that don't count", HotOS 2021). The gradients that are compared are those
that the step has applied; if they differ, it is undone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cifar10.errors import NotFiniteError
from cifar10.towers.graphs import traced
from cifar10.towers.towers import Batch, StepResult, TowerBuilder, TowerResult

# By how much two devices may differ in a variable's gradient, in proportion to its
# norm, where --deterministic does not promise the same bits (docs/auditing.md).
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.05}


class CorruptedError(NotFiniteError):
    """Two devices disagree about a gradient, which the images are not to blame for."""


class VerifyingBuilder(TowerBuilder):
    """Runs every so many steps twice, each tower also on the device of another.

    A single tower is computed twice by its own device. `bound` is how far gradients may
    differ in proportion.
    """

    def __init__(
        self, period: int, bound: float, *arguments: Any, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._period = period
        self._bound = bound
        batches = len(self.devices) // len({*self.devices})  # Of each device.
        self._elsewhere = self.devices[batches:] + self.devices[:batches]
        self._done = 0  # Steps, of the whole run.

    def freeze(self, names: Sequence[str]) -> None:
        """Trains all variables but these from now on; all is traced anew."""
        super().freeze(names)
        self._again = traced(
            lambda batches: self._trace_towers(self.state, self._elsewhere, batches)
        )
        self._verified = traced(self._trace_verified)

    def synchronize(self, numbers: Sequence[int]) -> list[int]:
        """Notes the first number, the step that a run begins with or goes back to."""
        self._done = numbers[0]
        return super().synchronize(numbers)

    def steps(self, batches: Sequence[Sequence[Batch]]) -> StepResult:
        """Runs several steps, of which none is to be verified."""
        self._done += len(batches)
        return super().steps(batches)

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Runs a step; raises a `CorruptedError`, and undoes it, if it differs."""
        self._done += 1
        if self._done % self._period:
            return super().step(batches)
        variables = self.state.variables()
        before = [variable.read_value() for variable in variables]
        again = self._again([*batches])
        results, result = self._verified([*batches])
        for tower, pair in enumerate(zip(results, again, strict=True)):
            both = (of_tower.gradients for of_tower in pair)
            for path, ours, theirs in zip(self._names, *both, strict=True):
                far = 0.0 if ours is None else proportion(ours, theirs)
                if far <= self._bound:
                    continue
                for variable, value in zip(variables, before, strict=True):
                    variable.assign(value)
                raise CorruptedError(
                    self._done,
                    f"the gradient of {path} on tower {tower} "
                    f"({self.tower_names[tower]}) differs from that on "
                    f"{self._elsewhere[tower]} by {far:.2g} of its size: one of these "
                    "devices computes wrongly",
                )
        return result

    def _trace_verified(
        self, batches: list[Batch]
    ) -> tuple[list[TowerResult], StepResult]:
        """Builds a step in one graph, as without verification: so it rounds alike."""
        state, devices = self.state, self.devices
        results = self._trace_towers(state, devices, batches)
        averages = self._trace_averages(state, devices, batches, results=results)
        return results, self._trace_update(state, averages)


def proportion(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
    """Returns how far values are from others, in proportion to the larger norm.

    It is 0 if all are the same, and at most 2, as for what is no number.
    """
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    is_floating = ours.dtype.kind not in "iub"
    if np.array_equal(ours, theirs, equal_nan=is_floating):
        return 0.0
    if not is_floating:
        return 2.0
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(all="ignore"):
        size = np.maximum(np.linalg.norm(ours), np.linalg.norm(theirs))
        found = np.linalg.norm(ours - theirs) / size
    return float(found) if np.isfinite(found) else 2.0
