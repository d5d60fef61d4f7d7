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
from cifar10.training.timing import Throughput, significant

_REPEATS = 5


def report(
    throughput: Throughput, towers: TowerBuilder, batches: Sequence[Batch]
) -> str:
    """Measures the parts of a step, and returns how its time divides, a line for each.

    Nothing is updated.
    """
    if (timed := throughput.median_step()) is None:
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

    parts = divide(
        *timed,
        towers=seconds_of(lambda: towers.results(batches)),
        # The gradients of a single tower are passed on as they are.
        averaging=seconds_of(lambda: average(results)) if len(results) > 1 else 0.0,
    )
    end, step = 0.0, sum(parts.values())
    lines = [f"A step took {significant(step * 1e3)} ms:"]
    for name, seconds in parts.items():
        begin, end = end, end + 100 * seconds / step
        # Rounded where parts meet, so that the rounded parts also add up to 100.
        percent = round(end) - round(begin)
        lines.append(f"  {name:<30}{significant(seconds * 1e3):>9} ms{percent:5}%")
    return "\n".join(lines)


def divide(
    step: float, waiting: float, *, towers: float, averaging: float
) -> dict[str, float]:
    """Divides the seconds of a step into parts, none negative, that add up to it.

    `towers` and `averaging` were measured separately. They may be longer than within
    the step, where they overlap with others; they share what `waiting` leaves.
    """
    waiting = min(waiting, step)
    scale = min(1.0, (step - waiting) / (towers + averaging))
    parts = {
        "input: waiting for images": waiting,
        "towers: forward and backward": scale * towers,
        "averaging": scale * averaging,
    }
    rest = max(0.0, step - sum(parts.values()))
    return {**parts, "update, Python and the rest": rest}


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
