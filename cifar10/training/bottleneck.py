"""How a step's time divides, measured after a run."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from cifar10.towers.builder import Batch, TowerBuilder
from cifar10.training import timing


def division(
    throughput: timing.Throughput, towers: TowerBuilder, batches: Sequence[Batch]
) -> str:
    """Measures the phases of a step and says how its time divides.

    Args:
        throughput: The time of the steps that ran.
        towers: What ran them.
        batches: One (inputs, labels) per tower.
    """
    if not throughput.steps:
        return "No step was timed, so its time cannot be divided."
    on_host = [tuple(tensor.numpy() for tensor in batch) for batch in batches]

    def transfer() -> None:
        for device, batch in zip(towers.devices, on_host, strict=True):
            with tf.device(device):
                for tensor in batch:
                    tf.identity(tensor)

    return throughput.division(
        timing.seconds_of(transfer),
        timing.seconds_of(lambda: towers.phase(batches, average=False)),
        timing.seconds_of(lambda: towers.phase(batches, average=True)),
        f"{'all-reduce, ' if towers.reduces else ''}update, Python and the rest",
    )
