"""The synchronous update of a step, and the variables that it writes.

Only the device knows whether a step's results are finite, and waiting for the host to
find out would delay updates on a GPU. So each update is applied, and undone if they are
not. TensorFlow keeps the buffers of the old values, which have been read, so undoing
moves no bytes; selecting values on the device would take a kernel for each variable.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar10.models.layer_tree import written_variables
from cifar10.towers.copies import Gradient, OptionalTensor, Tensors, widened
from cifar10.towers.graphs import assign_unless


class TrainState:
    """All variables that a synchronous update writes.

    All of them live on `device`. The constructor creates the optimizer's variables.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.Optimizer, device: str = "/cpu:0"
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        with tf.device(device):
            optimizer.build(trained := model.trainable_variables)
            # Moving averages of the trainable variables, in the same order.
            self.averages = [tf.Variable(v.value, trainable=False) for v in trained]
            # Updates applied so far, or skipped because they were not finite.
            self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
            # Whether updates have ended for that reason; not in checkpoints.
            self.halted = tf.Variable(False, trainable=False)

    def variables(self) -> list[tf.Variable]:
        """Returns the variables that a step writes but `halted`, `global_step` last."""
        model, optimizer = self.model, self.optimizer
        of_model = [*model.trainable_variables, *model.non_trainable_variables]
        of_keras = [variable.value for variable in (*of_model, *optimizer.variables)]
        return [*of_keras, *self.averages, self.global_step]

    def trackables(self) -> dict[str, Any]:
        """Maps names to the objects of a checkpoint; evaluation restores only some."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "averages": self.averages,
            "global_step": self.global_step,
            # Apart, as Keras hides random states from TensorFlow's checkpoints.
            "non_trainable": [v.value for v in self.model.non_trainable_variables],
        }


class Averages(NamedTuple):
    """The means of all towers' results, which the update applies.

    `gradients` are in the order of the trainable variables, `statistics` (what layers
    assign) in that of `written_variables`. None leaves a variable unchanged.
    """

    gradients: list[Gradient]
    statistics: list[OptionalTensor]
    metrics: dict[str, tf.Tensor]
    tower_losses: tf.Tensor  # floating [towers], the total loss of each tower.
    global_batch_size: int  # Images of all towers together.


@dataclasses.dataclass(frozen=True)
class Update:
    """Updates all variables with the `Averages` of a step."""

    # Maps the number of examples seen, int64 [], to the next rate.
    learning_rate: Callable[[tf.Tensor], tf.Tensor]
    # Maps `global_step` to the decay of the averages; None: they keep initial values.
    average_decay: Callable[[tf.Tensor], tf.Tensor] | None
    # Largest global norm of the gradients, which are scaled down if needed; None: any.
    clip_norm: float | None = None
    # Whether updates end at the first step that is not finite: it and all later ones
    # write nothing. If False, only such steps are skipped, and `global_step` advances.
    halts: bool = True
    # Whether XLA compiles updates alone: all kernels, hundreds in Muon, start at once.
    xla: bool = False

    def __call__(
        self,
        state: TrainState,
        averages: Averages,
        *,
        is_wanted: OptionalTensor = None,
        xla: bool = False,
    ) -> dict[str, tf.Tensor]:
        """Applies one update, if the towers' losses and the gradients are finite.

        Writes nothing if `is_wanted`, bool [], is false; None means true. `xla` tells
        whether XLA compiles the function that calls this.

        Returns metrics by name: `learning_rate`, `gradient_norm` (the global norm of
        the gradients before clipping) and, in float16, `loss_scale` (the factor by
        which the loss is multiplied).
        """
        pairs = zip(averages.gradients, state.model.trainable_variables, strict=True)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        gradients = [one for one in averages.gradients if one is not None]
        rate = self.learning_rate(state.global_step * averages.global_batch_size)
        metrics = _gradient_metrics(state, gradients)
        if self.clip_norm is not None:
            factor = tf.minimum(self.clip_norm / metrics["gradient_norm"], 1.0)
            gradients = [tf.cast(factor, one.dtype) * one for one in gradients]
        writes = tf.reduce_all(tf.math.is_finite(averages.tower_losses))
        writes &= tf.reduce_all(tf.math.is_finite(metrics["gradient_norm"]))
        if self.halts:
            writes &= ~state.halted.read_value()
        fails = ~writes
        if is_wanted is not None:
            writes, fails = writes & is_wanted, fails & is_wanted
        undone = state.variables()
        before = [variable.read_value() for variable in undone]
        self._write(state, zip(gradients, variables, strict=True), averages, rate)
        if self.halts:
            state.halted.assign(fails if is_wanted is None else fails | state.halted)
        else:  # A skipped step counts: `global_step` is the last variable.
            before[-1] += tf.cast(fails, tf.int64)
        assign_unless(writes, undone, before, xla=xla)
        return {**metrics, "learning_rate": rate}

    def _write(
        self, state: TrainState, pairs: Iterable, averages: Averages, rate: tf.Tensor
    ) -> None:
        """Applies `pairs` of gradients and variables, and assigns all else."""
        learning_rate = state.optimizer.learning_rate
        learning_rate.assign(tf.cast(rate, learning_rate.dtype))
        written = written_variables(state.model)
        for variable, value in zip(written, averages.statistics, strict=True):
            if value is not None:
                variable.assign(value)
        # As `fit` does: a user's class may override this, or `apply`, which it calls.
        state.optimizer.apply_gradients(pairs)
        if self.average_decay is not None:
            decay = self.average_decay(state.global_step)
            trained = state.model.trainable_variables
            for average, variable in zip(state.averages, trained, strict=True):
                fresh = tf.cast(1.0 - decay, average.dtype)
                old = average.read_value()
                average.assign(old - fresh * (old - variable.value))
        state.global_step.assign_add(1)


def _gradient_metrics(state: TrainState, gradients: Tensors) -> dict[str, tf.Tensor]:
    """Returns the global norm of the gradients and, in float16, the loss scale."""
    norm = tf.linalg.global_norm(widened(gradients))
    if not isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
        return {"gradient_norm": norm}
    scale = tf.cast(state.optimizer.scale_loss(1.0), norm.dtype)
    # If the norm overflows, the optimizer skips the update and lowers the scale.
    norm = tf.where(tf.math.is_finite(norm), norm / scale, 0.0)
    return {"gradient_norm": norm, "loss_scale": scale}
