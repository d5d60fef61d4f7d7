"""Tells from a few numbers, which checkpoints keep, whether a training has diverged.

It has if its loss was once a hundred times that of the first step, or of guessing, and
in most of the latest steps the model knows nothing. So neither one bad batch nor a loss
that is large from the start counts, nor a run that stays at chance, as in a warm-up or
with random labels.
"""

import math
from collections.abc import Mapping

from cifar10.config.fields import PRECISION, Groups
from cifar10.errors import rounded

# The last is a moving average of whether a step was lost; absent before a loss rises.
_FIRST, _HIGHEST, LOST = "first loss", "highest loss", "lost steps"
# A high learning rate that training survives raises the loss about tenfold.
_RISEN = 100.0
# Where classes are of unequal size, a lost model may be right often. But no model that
# learns is so far off: at a learning rate of 1,000, a linear one does at 1e5.
_FAR = 1e6
_NEAR_CHANCE = 0.1  # In accuracy, whose average varies less by chance.
_DECAY, _MOST = 0.9, 0.75  # So 14 steps in a row.


def track(averages: dict[str, float], of: Mapping[str, float], classes: int) -> None:
    """Updates the numbers with the metrics `of` a step, after the other averages."""
    first = averages.setdefault(_FIRST, of["total_loss"])
    highest = max(averages.get(_HIGHEST, first), of["total_loss"])
    averages[_HIGHEST] = highest
    guessing = math.log(max(2, classes))
    usual = max(abs(first), guessing)
    if highest >= _RISEN * usual:
        guesses = averages[PRECISION] < 1 / classes + _NEAR_CHANCE
        is_lost = guesses and of["cross_entropy"] > 0.95 * guessing
        is_lost |= min(of["total_loss"], of["cross_entropy"]) > _FAR * usual
        averages[LOST] = _DECAY * averages.get(LOST, 0.0) + (1 - _DECAY) * is_lost


def divergence(config: Groups, averages: Mapping[str, float]) -> str:
    """Describes the divergence of a run with these numbers; "" if there is none."""
    if averages.get(LOST, 0.0) < _MOST:
        return ""
    first, highest = (rounded(averages.get(n, 0.0), 2) for n in (_FIRST, _HIGHEST))
    rose = f"its loss rose from {first} to {highest}"
    return f"The training has DIVERGED: {rose}. {how_to_prevent(config)}"


def how_to_prevent(config: Groups) -> str:
    """Advises on a new run whose loss stays finite and falls."""
    rate = f"a --learning_rate below {config.update.learning_rate}"
    how = f"{rate}, --clip_norm or --warmup_epochs usually helps"
    return f"In a new run (another --train_dir), {how}."
