"""The synchronous update, the one place where a step writes, and what it writes.

Only the device that computes a step knows whether it is finite. On a GPU an update that
waited for the host to find out would begin late, so it is applied in any case, and
undone if need be. The old and the new values are two buffers, and assigning one moves
no bytes; selecting on the device would take a kernel for each variable.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from cifar10.towers.graphs import assign_unless

Gradient: TypeAlias = "tf.Tensor | None"


class TrainState:
    """Everything a synchronous update writes.

    All variables live on `device`, those of the model included. The optimizer is built
    here for them.

    Attributes:
        averages: Moving averages of the trainable variables, in their order.
        global_step: int64 [], updates applied so far, and those skipped because a
            number was not finite.
        halted: bool [], whether a step was not finite and no update is applied any
            more; no checkpoint holds it.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        device: str = "/cpu:0",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        with tf.device(device):
            optimizer.build(model.trainable_variables)
            self.averages = [
                tf.Variable(variable.value, trainable=False)
                for variable in model.trainable_variables
            ]
            self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.halted = tf.Variable(False, trainable=False)

    def variables(self) -> list[tf.Variable]:
        """Returns every variable that a step writes but `halted`, in a fixed order."""
        keras_variables = [
            *self.model.trainable_variables,
            *self.model.non_trainable_variables,
            *self.optimizer.variables,
        ]
        return [
            *[variable.value for variable in keras_variables],
            *self.averages,
            self.global_step,
        ]

    def trackables(self) -> dict[str, Any]:
        """Returns what a checkpoint holds, by name; evaluation reads a part of it."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "averages": self.averages,
            "global_step": self.global_step,
            # Named once more, because Keras does not show TensorFlow the state of
            # random generators.
            "non_trainable": [v.value for v in self.model.non_trainable_variables],
        }


class Averages(NamedTuple):
    """The means of all towers' results, which the update applies.

    Gradients and statistics, the new values of the non-trainable variables, are in the
    order of the model's variables; None leaves a variable as it is.
    """

    gradients: list[Gradient]
    statistics: list[tf.Tensor | None]
    metrics: dict[str, tf.Tensor]
    tower_losses: tf.Tensor  # floating [towers], the total loss of each tower.
    global_batch_size: int  # Images of all towers together.


class Update:
    """Writes everything that a step writes; nothing else in a step writes.

    Args:
        learning_rate: From the examples seen, int64 [], to the rate of the next update.
        average_decay: From `global_step` to the decay of the moving averages; None:
            they stay as they began.
        clip_norm: Norm to which all gradients are scaled down together if theirs is
            larger; None: not at all.
        halts: Whether a step that is not finite is the last one: neither it nor a later
            one writes anything. Otherwise only that step is skipped, and
            `global_step` advances.
    """

    def __init__(
        self,
        learning_rate: Callable[[tf.Tensor], tf.Tensor],
        average_decay: Callable[[tf.Tensor], tf.Tensor] | None,
        *,
        clip_norm: float | None = None,
        halts: bool = True,
    ) -> None:
        self._learning_rate = learning_rate
        self._average_decay = average_decay
        self._clip_norm = clip_norm
        self._halts = halts

    def __call__(self, state: TrainState, averages: Averages) -> dict[str, tf.Tensor]:
        """Applies one update, if the towers' losses and the gradients are finite.

        Returns:
            Metrics by name: `learning_rate`; `gradient_norm`, the global norm of the
            gradients before clipping; in float16 `loss_scale`, the factor by which the
            loss is multiplied.
        """
        present = [
            (gradient, variable)
            for gradient, variable in zip(
                averages.gradients, state.model.trainable_variables, strict=True
            )
            if gradient is not None
        ]
        rate = self._learning_rate(state.global_step * averages.global_batch_size)
        metrics = _gradient_metrics(state, [gradient for gradient, _ in present])
        if self._clip_norm is not None:
            factor = tf.minimum(self._clip_norm / metrics["gradient_norm"], 1.0)
            present = [
                (tf.math.scalar_mul(factor, gradient), variable)
                for gradient, variable in present
            ]
        writes = _all_finite(averages.tower_losses)
        writes &= _all_finite(metrics["gradient_norm"])
        if self._halts:
            writes &= ~state.halted.read_value()
        undone = [
            variable
            for variable in state.variables()
            if self._halts or variable is not state.global_step
        ]
        before = [variable.read_value() for variable in undone]
        self._write(state, present, averages.statistics, rate)
        if self._halts:
            state.halted.assign(~writes)
        assign_unless(writes, undone, before)
        return {**metrics, "learning_rate": rate}

    def _write(
        self,
        state: TrainState,
        gradients_and_variables: Sequence[tuple[Gradient, keras.Variable]],
        statistics: Sequence[tf.Tensor | None],
        rate: tf.Tensor,
    ) -> None:
        learning_rate = state.optimizer.learning_rate
        learning_rate.assign(tf.cast(rate, learning_rate.dtype))
        gradients, variables = zip(*gradients_and_variables, strict=True)
        state.optimizer.apply(list(gradients), list(variables))
        for variable, value in zip(
            state.model.non_trainable_variables, statistics, strict=True
        ):
            if value is not None:
                variable.assign(value)
        if self._average_decay is not None:
            _average(state, self._average_decay(state.global_step))
        state.global_step.assign_add(1)


def _average(state: TrainState, decay: tf.Tensor) -> None:
    for average, variable in zip(
        state.averages, state.model.trainable_variables, strict=True
    ):
        fresh = tf.cast(1.0 - decay, average.dtype)
        old = average.read_value()
        average.assign(old - fresh * (old - variable.value))


def _gradient_metrics(
    state: TrainState, gradients: Sequence[Gradient]
) -> dict[str, tf.Tensor]:
    """Returns the norm of all gradients and, in float16, the factor of the loss."""
    norm = tf.linalg.global_norm(gradients)
    if not isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
        return {"gradient_norm": norm}
    scale = tf.cast(state.optimizer.scale_loss(1.0), norm.dtype)
    # The optimizer skips an update that overflows and lowers the factor.
    norm = tf.where(tf.math.is_finite(norm), norm / scale, 0.0)
    return {"gradient_norm": norm, "loss_scale": scale}


def _all_finite(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(values))
