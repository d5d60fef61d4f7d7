"""What one synchronous step returns."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one synchronous step tells.

    Attributes:
        metrics: Scalars by name. What the loss function returns is the mean over all
            towers; `learning_rate` is the rate of this update; `gradient_norm` the norm
            of all averaged gradients together.
        tower_losses: floating [towers], each tower's total loss.
        gradients: The averaged gradients by variable; only with summaries.
        activations: The first tower's activations by layer; only with summaries.
    """

    metrics: dict[str, tf.Tensor]
    tower_losses: tf.Tensor
    gradients: dict[str, tf.Tensor]
    activations: dict[str, tf.Tensor]
