"""The learning rate and the decay of moving averages, as pure functions.

A schedule maps the number of examples seen, int64 [], to a learning rate, float64 [].
So runs of the same length and global batch have the same rate at the same epoch, with
any towers. The decay of averages depends on the number of updates, as in the tutorial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import tensorflow as tf

Schedule: TypeAlias = Callable[["tf.Tensor | int"], "tf.Tensor"]

_RISING_PART = 0.3  # The fraction of the run in which the rate of `one_cycle` rises.


class Curve(NamedTuple):
    """A value of `--schedule`.

    `function` maps a time, and the values of `parameters` by name, to a fraction of the
    highest rate; both are float64 []. The time is 1 at the end of the run.
    """

    function: Callable[..., tf.Tensor]
    help: str
    # Each is a flag: its default, its least and largest value, and its help.
    parameters: Mapping[str, tuple[float, float, float, str]] = {}
    period: str | None = None  # Parameter of the epochs in which `time` grows by 1.


def staircase(time: tf.Tensor) -> tf.Tensor:
    """Returns a factor that falls tenfold whenever `time` reaches a whole number."""
    import tensorflow as tf

    return tf.pow(tf.constant(0.1, tf.float64), tf.floor(time))


def linear(time: tf.Tensor) -> tf.Tensor:
    """Returns a factor that falls evenly from 1 to 0 while `time` runs from 0 to 1."""
    import tensorflow as tf

    return tf.maximum(1.0 - time, 0.0)


def cosine(time: tf.Tensor) -> tf.Tensor:
    """Returns a factor that falls from 1 to 0 along half a cosine."""
    # The formula of Keras's CosineDecay (https://arxiv.org/abs/1608.03983).
    import tensorflow as tf

    return 0.5 * (1.0 + tf.cos(math.pi * tf.minimum(time, 1.0)))


def one_cycle(time: tf.Tensor) -> tf.Tensor:
    """Returns a factor that rises to 1, and then falls to almost 0."""
    # Smith and Topin's cycle (https://arxiv.org/abs/1708.07120), with the form and the
    # defaults of PyTorch's OneCycleLR: the rise and the fall are each half a cosine.
    # Unlike in PyTorch, the momentum is constant.
    import tensorflow as tf

    start = 1.0 / 25.0
    end = start / 1e4
    rising = start + (1.0 - start) * (1.0 - cosine(time / _RISING_PART))
    falling = cosine((time - _RISING_PART) / (1.0 - _RISING_PART))
    return tf.where(time < _RISING_PART, rising, end + (1.0 - end) * falling)


CURVES: Mapping[str, Curve] = {
    "staircase": Curve(
        staircase,
        "times 0.1 every --epochs_per_decay epochs",
        {"epochs_per_decay": (350.0, 1e-6, 1e30, "epochs between two decays")},
        period="epochs_per_decay",
    ),
    "linear": Curve(linear, "falls to zero at the last step"),
    "cosine": Curve(cosine, "falls to zero at the last step, along half a cosine"),
    "one_cycle": Curve(one_cycle, "rises, then falls to almost zero at the last step"),
}
ENDING = tuple(name for name, curve in CURVES.items() if curve.period is None)
PARAMETERS = {n: one for kind in CURVES.values() for n, one in kind.parameters.items()}


def warmed_up(
    schedule: Schedule, examples: float, global_batch_size: int, seen: tf.Tensor | int
) -> tf.Tensor:
    """Returns a schedule's rate times a factor that rises to 1 in `examples` images."""
    # The images of an update count towards its own factor. Otherwise the first factor
    # would be 0, and the first update wasted. The schedule itself is not delayed: it
    # begins at the first update and ends as it would without a warm-up.
    import tensorflow as tf

    seen_after = tf.cast(seen + global_batch_size, tf.float64)
    return schedule(seen) * tf.minimum(seen_after / examples, 1.0)


def average_decay(maximum: float, global_step: tf.Tensor | int) -> tf.Tensor:
    """Returns the decay of the moving averages at a step, float64 [].

    The decay is min(maximum, (1 + step) / (10 + step)); in the tutorial, the maximum is
    0.9999. The step is `global_step`, int64 [], the number of earlier updates. Early
    averages forget quickly, and are useful long before step 1 / (1 - maximum).
    """
    import tensorflow as tf

    step = tf.cast(global_step, tf.float64)
    return tf.minimum(tf.constant(maximum, tf.float64), (1 + step) / (10 + step))
