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

_FIRST, _HIGHEST = "first loss", "highest loss"
# The moving average of whether a step was lost; absent before the loss has risen.
LOST = "lost steps"
# Too high a learning rate that training survives raises a loss about tenfold.
_RISEN = 100.0
# Where classes are of unequal size, a lost model may be right often. But no model that
# learns is so far off: at a learning rate of 1,000, a linear one does at 1e5.
_FAR = 1e6
_NEAR_CHANCE = 0.1  # In accuracy, whose average varies less by chance.
_DECAY, _MOST = 0.9, 0.75  # So 14 steps in a row.


def track(
    averages: dict[str, float], newest: Mapping[str, float], classes: int
) -> None:
    """Updates the numbers with a step's metrics, which the averages have already."""
    loss, entropy = newest["total_loss"], newest["cross_entropy"]
    first = averages.setdefault(_FIRST, loss)
    averages[_HIGHEST] = max(averages.get(_HIGHEST, first), loss)
    guessing = math.log(max(2, classes))
    usual = max(abs(first), guessing)
    if averages[_HIGHEST] >= _RISEN * usual:
        is_far = min(loss, entropy) > _FAR * usual
        guesses = averages[PRECISION] < 1 / classes + _NEAR_CHANCE
        is_lost = is_far or (guesses and entropy > 0.95 * guessing)
        averages[LOST] = _DECAY * averages.get(LOST, 0.0) + (1 - _DECAY) * is_lost


def divergence(config: Groups, averages: Mapping[str, float]) -> str:
    """Describes the divergence of a run with these numbers; "" if there is none."""
    if averages.get(LOST, 0.0) < _MOST:
        return ""
    first, highest = averages.get(_FIRST, 0.0), averages.get(_HIGHEST, 0.0)
    return (
        f"the training has DIVERGED: its loss rose from {rounded(first, 2)} to "
        f"{rounded(highest, 2)}. {how_to_prevent(config)}"
    )


def how_to_prevent(config: Groups) -> str:
    """Advises on a new run whose loss stays finite and falls."""
    return (
        "In a new run (another --train_dir), a --learning_rate below "
        f"{config.update.learning_rate}, --clip_norm or --warmup_epochs usually helps."
    )
