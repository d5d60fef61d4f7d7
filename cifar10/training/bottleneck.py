"""Divides the time of a step into its phases, measured after a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from cifar10.towers.towers import (
    Batch,
    TowerBuilder,
    TowerResult,
    average_gradients,
    average_statistics,
)
from cifar10.training.timing import Throughput

_REPEATS = 5


def report(
    throughput: Throughput, towers: TowerBuilder, batches: Sequence[Batch]
) -> str:
    """Measures the phases of a step, and returns how its time divides, a line for each.

    Nothing is updated.
    """
    if (timed := throughput.median_step()) is None:
        return "No step was timed, so its time cannot be divided."
    step, waiting = timed
    on_host = [tuple(tensor.numpy() for tensor in batch) for batch in batches]
    results = towers.results(batches)

    def transfer() -> None:
        for device, batch in zip(towers.devices, on_host, strict=True):
            with tf.device(device):
                for tensor in batch:
                    tf.identity(tensor)

    @tf.function(autograph=False)
    def average(results: list[TowerResult]) -> tuple:
        names = [variable.path for variable in towers.state.model.trainable_variables]
        with tf.device(towers.state.device):
            return (
                average_gradients([result.gradients for result in results], names),
                average_statistics([result.statistics for result in results]),
            )

    forward_and_backward = seconds_of(lambda: towers.results(batches))
    averaging = seconds_of(lambda: average(results))
    phases = {
        "input: waiting for images": waiting,
        "towers: forward and backward": forward_and_backward,
        "averaging": averaging,
        "update, Python and the rest": max(
            step - waiting - forward_and_backward - averaging, 0.0
        ),
        "transfer, while the step before runs": seconds_of(transfer),
    }
    return f"A step took {step * 1e3:.2f} ms:" + "".join(
        f"\n  {name:<38}{seconds * 1e3:9.2f} ms {seconds / step:6.1%}"
        for name, seconds in phases.items()
    )


def seconds_of(action: Callable[[], object]) -> float:
    """Returns how long an action takes, in seconds: the median of a few.

    The first time, which may compile something, is not counted.
    """
    measured = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        action()
        tf.test.experimental.sync_devices()
        measured.append(time.perf_counter() - began)
    return statistics.median(measured[1:])
