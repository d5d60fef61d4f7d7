"""The learning rate and the averages' decay, as pure functions.

Time is measured in examples seen, never in steps: two runs with the same global batch
are at the same rate at the same epoch, whatever their number of towers. A schedule is a
function from the number of examples seen, int64 [], to the learning rate, float64 [].
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import tensorflow as tf

Schedule: TypeAlias = Callable[["tf.Tensor | int"], "tf.Tensor"]

# The tutorial multiplies the learning rate by this every `epochs_per_decay` epochs.
_DECAY_FACTOR = 0.1
# One cycle as PyTorch's OneCycleLR has it by default: the rate rises in this part of
# the training, from the highest one divided by the first divisor, and ends at where it
# began divided by the second.
_RISING_PART = 0.3
_DIVISOR_AT_START = 25.0
_DIVISOR_AT_END = 1e4


@dataclasses.dataclass(frozen=True)
class StaircaseDecay:
    """A learning rate that falls by a constant factor every so many epochs."""

    initial_rate: float
    epochs_per_decay: float  # Between two falls.
    examples_per_epoch: int

    def __call__(self, examples_seen: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate after `examples_seen` images."""
        period = self.epochs_per_decay * self.examples_per_epoch
        falls = tf.floor(tf.cast(examples_seen, tf.float64) / period)
        return self.initial_rate * tf.pow(tf.constant(_DECAY_FACTOR, tf.float64), falls)


@dataclasses.dataclass(frozen=True)
class LinearDecay:
    """A learning rate that falls evenly and reaches zero at the end of the training."""

    initial_rate: float
    total_examples: int  # Of the whole training, each as often as it is seen.

    def __call__(self, examples_seen: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate after `examples_seen` images."""
        seen = tf.cast(examples_seen, tf.float64) / self.total_examples
        return self.initial_rate * tf.maximum(1.0 - seen, 0.0)


@dataclasses.dataclass(frozen=True)
class CosineDecay:
    """A learning rate that falls along half a cosine, to zero at the training's end.

    The formula of `keras.optimizers.schedules.CosineDecay`
    (https://arxiv.org/abs/1608.03983).
    """

    initial_rate: float
    total_examples: int  # Of the whole training, each as often as it is seen.

    def __call__(self, examples_seen: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate after `examples_seen` images."""
        seen = tf.cast(examples_seen, tf.float64) / self.total_examples
        return _along_cosine(self.initial_rate, 0.0, seen)


@dataclasses.dataclass(frozen=True)
class OneCycle:
    """A learning rate that rises once, and then falls to almost zero.

    Smith and Topin's (https://arxiv.org/abs/1708.07120) in the form and with the
    defaults of PyTorch's OneCycleLR: either part is half a cosine. The momentum, which
    they let fall and rise, is constant here.
    """

    highest_rate: float
    total_examples: int  # Of the whole training, each as often as it is seen.

    def __call__(self, examples_seen: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate after `examples_seen` images."""
        seen = tf.cast(examples_seen, tf.float64) / self.total_examples
        start = self.highest_rate / _DIVISOR_AT_START
        return tf.where(
            seen < _RISING_PART,
            _along_cosine(start, self.highest_rate, seen / _RISING_PART),
            _along_cosine(
                self.highest_rate,
                start / _DIVISOR_AT_END,
                (seen - _RISING_PART) / (1.0 - _RISING_PART),
            ),
        )


# By name, from the highest rate and the examples of the whole training.
ENDING: Mapping[str, Callable[[float, int], Schedule]] = {
    "linear": LinearDecay,
    "cosine": CosineDecay,
    "one_cycle": OneCycle,
}


def _along_cosine(start: float, end: float, part: tf.Tensor) -> tf.Tensor:
    """Returns what is a part of the way from start to end, along half a cosine."""
    angle = math.pi * tf.minimum(part, 1.0)
    return end + (start - end) * 0.5 * (1.0 + tf.cos(angle))


@dataclasses.dataclass(frozen=True)
class Warmup:
    """A learning rate that rises evenly from zero to that of another schedule.

    The rate of an update is that at the end of its own images; at their beginning the
    first rate would be zero, and those images lost. The other schedule also begins at
    the first update, so that it falls to zero when it would without a warm-up.
    """

    schedule: Schedule
    examples: float  # In which the rate rises.
    global_batch_size: int

    def __call__(self, examples_seen: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate after `examples_seen` images."""
        seen_after = tf.cast(examples_seen + self.global_batch_size, tf.float64)
        return self.schedule(examples_seen) * tf.minimum(
            seen_after / self.examples, 1.0
        )


def average_decay(maximum: float, global_step: tf.Tensor | int) -> tf.Tensor:
    """Returns the decay of the moving averages, float64 [], at a step.

    Early averages forget quickly, min(maximum, (1 + step) / (10 + step)), so that they
    are of use long before 1 / (1 - maximum) steps have passed. In the tutorial the
    maximum is 0.9999. `global_step`, int64 [], counts the updates before this one.
    """
    step = tf.cast(global_step, tf.float64)
    return tf.minimum(tf.constant(maximum, tf.float64), (1 + step) / (10 + step))
