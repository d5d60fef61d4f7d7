"""Several synchronous steps in one call, without returning to Python in between."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cifar10.towers.graphs import traced
from cifar10.towers.towers import Batch, StepResult, TowerBuilder


class ManySteps:
    """Runs several steps of some towers in one call."""

    def __init__(self, towers: TowerBuilder) -> None:
        self._towers = towers
        self.retrace()

    def retrace(self) -> None:
        """Traces the steps anew at the next call, as after `TowerBuilder.freeze`."""
        self._steps = traced(self._trace)

    def __call__(self, batches: Sequence[Sequence[Batch]]) -> StepResult:
        """Runs a step for each element of `batches[step][tower]`, all of one shape.

        The results have a leading dimension of steps.
        """
        stacked = []
        for device, tower_batches in zip(
            self._towers.devices, zip(*batches, strict=True), strict=True
        ):
            with tf.device(device):
                inputs, labels = zip(*tower_batches, strict=True)
                stacked.append((tf.stack(inputs), tf.stack(labels)))
        return self._towers.result(self._steps(stacked))

    def _trace(self, stacked: Any) -> StepResult:
        traced = self._towers.trace(self._batches(stacked, 0))
        return tf.map_fn(
            lambda step: self._towers.trace_step(self._batches(stacked, step)),
            tf.range(tf.nest.flatten(stacked)[0].shape[0]),
            parallel_iterations=1,  # A step begins with what the one before has left.
            fn_output_signature=tf.nest.map_structure(
                lambda output: tf.TensorSpec(output.shape, output.dtype),
                traced.structured_outputs,
            ),
        )

    def _batches(self, stacked: Any, step: tf.Tensor | int) -> list[Batch]:
        """Builds the batches of a step from those of all steps."""
        batches = []
        for device, (inputs, labels) in zip(self._towers.devices, stacked, strict=True):
            with tf.device(device):
                batches.append((inputs[step], labels[step]))
        return batches
