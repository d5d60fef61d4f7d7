"""One tower: a copy of the model as a pure function of its variables and a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.towers.averaging import Gradient
from cifar10.towers.train_state import TrainState

Inference = Callable[..., tuple]
Loss = Callable[..., dict[str, tf.Tensor]]

# Sets the towers' dropout masks apart; odd, so that no two towers below 2^32 coincide.
_TOWER_SEED_STRIDE = 0x9E3779B1


class TowerResult(NamedTuple):
    """What one tower computes.

    Attributes:
        metrics: Scalars by name, among them `total_loss`.
        gradients: One per trainable variable, in the model's order.
        statistics: New values of the non-trainable variables; None for those left as
            they are.
        activations: By layer; only with summaries.
    """

    metrics: dict[str, tf.Tensor]
    gradients: list[Gradient]
    statistics: list[tf.Tensor | None]
    activations: dict[str, tf.Tensor]


class Tower:
    """Computes towers; it reads the state and never writes.

    Args:
        inference: As `model.inference`: from a model, the values of its variables and
            inputs to outputs, new non-trainable values and penalties.
        loss: As `model.loss`: from outputs, labels and penalties to scalars by name,
            among them `total_loss`, each a mean over the batch.
        activations: A view of the model that also returns activations, and their names,
            as `model.with_activations` makes it. None: no activations with summaries.
        xla: Whether to compile each tower with XLA.
    """

    def __init__(
        self,
        inference: Inference,
        loss: Loss,
        *,
        activations: tuple[keras.Model, list[str]] | None = None,
        xla: bool = False,
    ) -> None:
        self._inference = inference
        self._loss = loss
        self._activations = activations
        self._xla = xla

    def __call__(
        self,
        state: TrainState,
        number: int,
        inputs: tf.Tensor,
        labels: tf.Tensor,
        *,
        summaries: bool = False,
    ) -> TowerResult:
        """Reads the variables once, and computes one tower from their values.

        Args:
            state: What it reads.
            number: The tower's, from 0, counted over all machines.
            inputs: What the model takes, [batch, ...].
            labels: What the loss takes, [batch, ...].
            summaries: Whether to return activations too.
        """
        model = state.model
        trainable = [
            tf.identity(variable.value) for variable in model.trainable_variables
        ]
        non_trainable = [
            for_tower(variable, number) for variable in model.non_trainable_variables
        ]
        scale = tf.convert_to_tensor(state.optimizer.scale_loss(1.0))
        compute = functools.partial(
            self._compute, state, view=self._activations if summaries else None
        )
        if self._xla:
            compute = tf.function(compute, jit_compile=True, autograph=False)
        return TowerResult(*compute(trainable, non_trainable, inputs, labels, scale))

    def _compute(
        self,
        state: TrainState,
        trainable: list[tf.Tensor],
        non_trainable: list[tf.Tensor],
        inputs: tf.Tensor,
        labels: tf.Tensor,
        scale: tf.Tensor,
        *,
        view: tuple[keras.Model, list[str]] | None,
    ) -> tuple[dict, list[Gradient], list[tf.Tensor | None], dict[str, tf.Tensor]]:
        """Computes one tower as a pure function of tensors."""
        model = state.model
        called, layer_names = view or (model, [])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            values = dict(
                zip(
                    map(id, model.trainable_variables + model.non_trainable_variables),
                    [*trainable, *non_trainable],
                    strict=True,
                )
            )
            outputs, statistics, penalties = self._inference(
                called,
                [values[id(variable)] for variable in called.trainable_variables],
                [values[id(variable)] for variable in called.non_trainable_variables],
                inputs,
                training=True,
            )
            outputs, *shown = outputs if view else [outputs]
            metrics = self._loss(outputs, labels, penalties)
            scaled = metrics["total_loss"]
            if isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
                scaled *= tf.cast(scale, scaled.dtype)
        by_id = dict(
            zip(map(id, called.non_trainable_variables), statistics, strict=True)
        )
        return (
            metrics,
            tape.gradient(scaled, trainable),
            [by_id[id(variable)] for variable in model.non_trainable_variables],
            dict(zip(layer_names, shown, strict=True)),
        )


def checksum(values: Sequence[Gradient]) -> tf.Tensor:
    """Returns a number that depends on every value, so that none is left out."""
    return tf.add_n(
        [
            tf.cast(tf.reshape(tf.convert_to_tensor(value), [-1])[0], tf.float64)
            for value in values
            if value is not None
        ]
    )


def for_tower(variable: keras.Variable, number: int) -> tf.Tensor:
    """Reads a non-trainable variable; random generators differ from tower to tower.

    Args:
        variable: The variable.
        number: The tower's, from 0, counted over all machines.
    """
    value = tf.identity(variable.value)
    if number and variable.name == "seed_generator_state":
        offset = (number * _TOWER_SEED_STRIDE) % 2**32
        value += tf.constant([offset, 0], value.dtype)
    return value
