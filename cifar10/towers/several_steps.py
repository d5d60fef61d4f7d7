"""Runs several steps in one call, without returning to Python in between."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from cifar10.towers.towers import Batch, StepResult, TowerBuilder


def stack(
    devices: Sequence[str], batches: "Sequence[Sequence[Batch]]"
) -> "list[Batch]":
    """Stacks each tower's batches, `batches[step][tower]`, on the tower's device."""
    stacked = []
    for device, of_tower in zip(devices, zip(*batches, strict=True), strict=True):
        with tf.device(device):
            inputs, labels = zip(*of_tower, strict=True)
            stacked.append((tf.stack(inputs), tf.stack(labels)))
    return stacked


def trace_steps(builder: "TowerBuilder", stacked: "list[Batch]") -> "StepResult":
    """Traces a loop over steps; `stacked` holds, by tower, the batches of all steps."""

    def batches_of(step: tf.Tensor | int) -> "list[Batch]":
        batches = []
        for device, (inputs, labels) in zip(builder.devices, stacked, strict=True):
            with tf.device(device):
                batches.append((inputs[step], labels[step]))
        return batches

    outputs = builder.trace(batches_of(0)).structured_outputs
    return tf.map_fn(
        lambda step: builder.trace_step(batches_of(step)),
        tf.range(stacked[0][0].shape[0]),
        parallel_iterations=1,  # Each step reads what the step before has written.
        fn_output_signature=tf.nest.map_structure(
            lambda output: tf.TensorSpec(output.shape, output.dtype), outputs
        ),
    )
