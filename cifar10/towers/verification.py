"""`--verify_steps` computes the gradients of a step twice, on different devices.

A processor that sometimes computes wrongly says nothing of it (Meta, arXiv 2102.11245;
Google, "Cores that don't count", HotOS 2021). The gradients that are compared are those
that the step has applied; if they differ, it is undone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.errors import NotFiniteError
from cifar10.towers.graphs import traced
from cifar10.towers.towers import Batch, StepResult, TowerBuilder
from cifar10.towers.update import Gradient

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
        self._elsewhere = self.devices[1:] + self.devices[:1]
        self._done = 0  # Steps, of the whole run.

    def freeze(self, names: Sequence[str]) -> None:
        """Trains all variables but these from now on; all is traced anew."""
        super().freeze(names)
        self._again = traced(self._trace_elsewhere)
        self._verified = traced(self._trace_verified)
        self._compare = traced(_proportions)

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
        again = self._again([*batches])
        variables = self.state.variables()
        before = [variable.read_value() for variable in variables]
        gradients, result = self._verified([*batches])
        found = self._compare(gradients, again).numpy()
        for tower, place in np.argwhere(~(found <= self._bound)):
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            path = self.state.model.trainable_variables[place].path
            raise CorruptedError(
                self._done,
                f"the gradient of {path} on tower {tower} ({self.tower_names[tower]}) "
                f"differs from that on {self._elsewhere[tower]} by "
                f"{found[tower, place]:.2g} of its size: one of these devices computes "
                "wrongly",
            )
        return result

    def _trace_elsewhere(self, batches: list[Batch]) -> list[list[Gradient]]:
        results = self._trace_towers(self.state, self._elsewhere, batches)
        return [result.gradients for result in results]

    def _trace_verified(
        self, batches: list[Batch]
    ) -> tuple[list[list[Gradient]], StepResult]:
        """Builds a step in one graph, as without verification: so it rounds alike."""
        state, devices = self.state, self.devices
        results = self._trace_towers(state, devices, batches)
        averages = self._trace_averages(state, devices, batches, results=results)
        gradients = [result.gradients for result in results]
        return gradients, self._trace_update(state, averages)


def _proportions(ours: list[list[Gradient]], theirs: list[list[Gradient]]) -> tf.Tensor:
    """Returns how far gradients differ in proportion, float64 [towers, variables].

    It is 0 where all bits are the same.
    """
    return tf.stack(
        [
            tf.stack([*map(_proportion, of_tower, again)])
            for of_tower, again in zip(ours, theirs, strict=True)
        ]
    )


def _proportion(ours: Gradient, theirs: Gradient) -> tf.Tensor:
    if ours is None or theirs is None:
        return tf.constant(0.0, tf.float64)
    are_same = (ours == theirs) | (tf.math.is_nan(ours) & tf.math.is_nan(theirs))
    far = tf.norm(tf.cast(ours, tf.float64) - tf.cast(theirs, tf.float64))
    size = tf.norm(tf.cast(theirs, tf.float64))
    return tf.where(tf.reduce_all(are_same), tf.zeros_like(far), far / size)
