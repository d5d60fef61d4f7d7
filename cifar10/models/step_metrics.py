"""The metrics of every step: how each is computed, shown and compared.

Their means over the towers, and moving averages, are in `metrics.jsonl`, TensorBoard
and hooks; `replay` and `audit` recompute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf

PRECISION = "precision @ 1"  # The accuracy's name.


class Metric(NamedTuple):
    """A metric of every step.

    `compute` takes labels, int64 [batch], and logits [batch, classes], in float32 or
    float64, and returns a value for each image. It is None for the terms of the loss.
    """

    compute: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None
    label: str = ""  # In the console's line of a step; empty if it is not there.
    title: str = ""  # Title of `report`'s chart of the average, if any.
    is_share: bool = False  # May be 0: `replay` compares differences, not ratios.


def is_right(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each image whose largest logit is at its label, else 0."""
    import tensorflow as tf

    return tf.cast(tf.argmax(logits, axis=1) == labels, logits.dtype)


STEP_METRICS: Mapping[str, Metric] = {
    "total_loss": Metric(title="Loss, moving average"),
    "cross_entropy": Metric(),
    "penalties": Metric(),
    PRECISION: Metric(is_right, "accuracy", is_share=True),
}
