"""Moving averages of a run's metrics, and whether they show a divergence.

A run has diverged if its loss once was a hundred times the larger of its first loss and
that of guessing, and most of the latest steps were no better than guessing. This leaves
out single bad batches, losses large from the start, warm-ups and random labels.
"""

import math
from collections.abc import Mapping

from cifar10.config.fields import PRECISION, BaseConfig
from cifar10.errors import rounded
from cifar10.models.step_metrics import STEP_METRICS

# The decay of the moving averages, as in the tutorial; they make curves smoother.
METRIC_AVERAGE_DECAY = 0.9
# The last is the average of whether a step was lost; absent before the loss has risen.
_FIRST, _HIGHEST, LOST = "first loss", "highest loss", "lost steps"
# Where classes are of unequal size, a lost model may be right often. But no model that
# learns is so far off: at a learning rate of 1,000, a linear one does at 1e5.
_FAR = 1e6


def average(averages: dict[str, float], new: Mapping[str, float], classes: int) -> None:
    """Updates the moving averages of metrics with a step's metrics."""
    loss, entropy = new["total_loss"], new["cross_entropy"]
    if not math.isfinite(loss):  # The mean of large losses overflows.
        return
    first = averages.setdefault(_FIRST, loss)
    highest = averages[_HIGHEST] = max(averages.get(_HIGHEST, first), loss)
    usual = max(abs(first), guessing := math.log(max(2, classes)))
    # A high learning rate that training survives raises the loss about tenfold.
    if highest >= 100.0 * usual:
        guesses = averages.get(PRECISION, 0.0) < 1 / classes + 0.1  # It varies less.
        is_lost = guesses and entropy > 0.95 * guessing
        is_lost |= min(loss, entropy) > _FAR * usual
        averages.setdefault(LOST, 0.0)
        new = {**new, LOST: float(is_lost)}
    for name in [name for name in (*STEP_METRICS, LOST) if name in new]:
        old = averages.get(name, new[name])
        mean = old + (1 - METRIC_AVERAGE_DECAY) * (new[name] - old)
        if math.isfinite(mean):  # Beside a loss of a program's own, some are not.
            averages[name] = mean


def divergence(config: BaseConfig, averages: Mapping[str, float]) -> str:
    """Describes the divergence of a run with these numbers; "" if there is none."""
    if averages.get(LOST, 0.0) < 0.75:  # Reached by 14 lost steps in a row.
        return ""
    first, highest = (rounded(averages.get(n, 0.0), 2) for n in (_FIRST, _HIGHEST))
    rose = f"its loss rose from {first} to {highest}"
    return f"The run has DIVERGED: {rose}. {how_to_prevent(config)}"


def how_to_prevent(config: BaseConfig) -> str:
    """Advises how to start a new run whose loss stays finite and falls."""
    rate = f"a --learning_rate below {config.update.learning_rate}"
    how = f"{rate}, --clip_norm or --warmup_epochs usually helps"
    return f"In a new run (another --train_dir), {how}."
