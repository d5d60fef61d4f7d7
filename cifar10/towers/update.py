"""The synchronous update: the one place where a step writes.

Only the device that computes a step knows whether it is finite. On a GPU an update that
waited for the host to find out would begin late, so it is applied in any case, and
undone if need be. The old and the new values are two buffers, and assigning one moves
no bytes; selecting on the device would take a kernel for each variable.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from cifar10.towers.train_state import TrainState

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


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

    def __call__(
        self,
        state: TrainState,
        gradients: Sequence[Gradient],
        statistics: Sequence[tf.Tensor | None],
        tower_losses: tf.Tensor,
        global_batch_size: int,
    ) -> dict[str, tf.Tensor]:
        """Applies one update, if the towers' losses and the gradients are finite.

        The arguments after `state` are as in `towers.Averages`: gradients and new
        values in the order of the model's variables. None leaves a variable as it is.

        Returns:
            `learning_rate`, the rate of this update; `gradient_norm`, the norm of all
            gradients together before they are clipped; in float16 `loss_scale`, the
            factor of the loss.
        """
        present = [
            (_merged(gradient), variable)
            for gradient, variable in zip(
                gradients, state.model.trainable_variables, strict=True
            )
            if gradient is not None
        ]
        rate = self._learning_rate(state.global_step * global_batch_size)
        metrics = _gradient_metrics(state, [gradient for gradient, _ in present])
        if self._clip_norm is not None:
            factor = tf.minimum(self._clip_norm / metrics["gradient_norm"], 1.0)
            present = [
                (tf.math.scalar_mul(factor, gradient), variable)
                for gradient, variable in present
            ]
        writes = _all_finite(tower_losses) & _all_finite(metrics["gradient_norm"])
        if self._halts:
            writes &= ~state.halted.read_value()
        undone = [
            variable
            for variable in state.variables()
            if self._halts or variable is not state.global_step
        ]
        before = [variable.read_value() for variable in undone]
        self._write(state, present, statistics, rate)
        if self._halts:
            state.halted.assign(~writes)
        _assign_unless(writes, undone, before)
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


def _assign_unless(
    condition: tf.Tensor, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]
) -> None:
    """Assigns values unless a condition holds, by one operation that is seldom more.

    TensorFlow lowers a `tf.cond` to a Switch for each variable and each value, and the
    host visits them all in every step: 807 of the 3,338 operations of `resnet`.
    """
    handles = [variable.handle for variable in variables]

    @tf.function(autograph=False)
    def assign(handles: list[tf.Tensor], values: list[tf.Tensor]) -> None:
        for handle, value in zip(handles, values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    @tf.function(autograph=False)
    def do_nothing(handles: list[tf.Tensor], values: list[tf.Tensor]) -> None:
        del handles, values

    arguments = handles, list(values)
    tf.raw_ops.If(
        cond=condition,
        input=[*handles, *values],
        Tout=[],
        then_branch=do_nothing.get_concrete_function(*arguments),
        else_branch=assign.get_concrete_function(*arguments),
    )


def _gradient_metrics(
    state: TrainState, gradients: Sequence[Gradient]
) -> dict[str, tf.Tensor]:
    """Returns the norm of all gradients and, in float16, the factor of the loss."""
    norm = tf.linalg.global_norm(gradients)  # Of merged slices it is that of the whole.
    if not isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
        return {"gradient_norm": norm}
    scale = tf.cast(state.optimizer.scale_loss(1.0), norm.dtype)
    # The optimizer skips an update that overflows and lowers the factor.
    norm = tf.where(tf.math.is_finite(norm), norm / scale, 0.0)
    return {"gradient_norm": norm, "loss_scale": scale}


def _all_finite(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(values))


def _merged(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Adds up the slices of one index, so that each index comes once.

    Keras's optimizers would square the slices one by one where Adam needs the square of
    their sum: an embedding has a slice for every time that a word occurs.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
