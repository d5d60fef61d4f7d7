"""Divides the time of a step into its parts, measured after a run."""

import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from cifar10.towers.graphs import traced
from cifar10.towers.towers import (
    Batch,
    TowerBuilder,
    TowerResult,
    average_gradients,
    average_statistics,
)
from cifar10.training.timing import TimedSteps, format_number

_REPEATS = 5


def divide_step_time(
    timed: TimedSteps, towers: TowerBuilder, batches: Sequence[Batch]
) -> str:
    """Measures the parts of a step, and returns how its time divides, a line for each.

    `timed` says how long the steps of the run took. Nothing is updated. Towers and
    averaging are measured separately, where they may take longer than within the step,
    which overlaps them with others. They share what the waiting for images leaves.
    """
    if not timed.steps:
        return "No step was timed, so its time cannot be divided."
    results = towers.results(batches)

    @traced
    def average(results: list[TowerResult]) -> tuple:
        names = [variable.path for variable in towers.state.model.trainable_variables]
        with tf.device(towers.state.device):
            return (
                average_gradients([result.gradients for result in results], names),
                average_statistics([result.statistics for result in results]),
            )

    computing = median_seconds(lambda: towers.results(batches))
    # The gradients of a single tower are passed on as they are.
    averaging = median_seconds(lambda: average(results)) if len(results) > 1 else 0.0
    step, waiting = timed.seconds / timed.steps, timed.waiting / timed.steps
    rest = max(0.0, step - waiting - computing - averaging)
    scale = (step - waiting - rest) / (computing + averaging)
    parts = {
        "input: waiting for images": waiting,
        "towers: forward and backward": scale * computing,
        "averaging": scale * averaging,
        "update, Python and the rest": rest,
    }
    lines = [f"A step took {format_number(step * 1e3)} ms:"]
    for name, seconds in parts.items():
        took = f"{format_number(seconds * 1e3):>9} ms{seconds / step:5.0%}"
        lines.append(f"  {name:<30}{took}")
    return "\n".join(lines)


def median_seconds(action: Callable[[], object]) -> float:
    """Returns how long an action takes: the median of a few times.

    The first time, which may compile something, is not counted.
    """
    measured = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        action()
        tf.test.experimental.sync_devices()
        measured.append(time.perf_counter() - began)
    return statistics.median(measured[1:])
