"""The learning rate and the averages' decay, as pure functions.

Time is measured in examples seen, never in steps: two runs with the same global batch
are at the same rate at the same epoch, whatever their number of towers. A schedule is a
function from the number of examples seen, int64 [], to the learning rate, float64 [].
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

# The tutorial multiplies the learning rate by this every `epochs_per_decay` epochs.
_DECAY_FACTOR = 0.1


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
class Warmup:
    """A learning rate that rises evenly from zero to that of another schedule.

    The rate of an update is that at the end of its own images; at their beginning the
    first one would be zero, and its images lost. The other schedule also begins at the
    first update, so that it falls to zero when it would without a warm-up.
    """

    schedule: Callable[[tf.Tensor | int], tf.Tensor]
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
