"""Towers: copies of one model on several devices, trained as if they were one.

A tower is pure: it takes the variables' values and a batch, and returns its losses, its
gradients and its new batch statistics. It never writes. The results of all towers are
averaged on the CPU, and one synchronous update then writes everything: the variables,
the optimizer's slots, the moving averages, the batch statistics, `global_step`. So N
towers of B / N images compute what one tower of B images computes.

Nothing here knows about images: the towers train any Keras model whose inputs and
labels come in batches.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.errors import UsageError

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
Inference = Callable[..., tuple]
Loss = Callable[..., dict[str, tf.Tensor]]

# Where the variables live and the gradients meet.
UPDATE_DEVICE = "/cpu:0"

# Sets the towers' dropout masks apart; odd, so that no two towers below 2^32 coincide.
_TOWER_SEED_STRIDE = 0x9E3779B1

logger = logging.getLogger(__name__)


class TrainState:
    """Everything a synchronous update writes.

    Args:
        model: The model, its variables on the CPU.
        optimizer: A Keras optimizer; it is built here for the model's variables.

    Attributes:
        averages: Moving averages of the trainable variables, in their order.
        global_step: int64 [], updates applied so far.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        with tf.device(UPDATE_DEVICE):
            optimizer.build(model.trainable_variables)
            self.averages = [
                tf.Variable(variable.value, trainable=False)
                for variable in model.trainable_variables
            ]
            self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)

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


class TowerBuilder:
    """Builds the synchronous step over towers on several devices.

    Args:
        state: What the step updates.
        devices: One device name per tower.
        inference: As `model.inference`: from a model, the values of its variables and
            inputs to outputs, new non-trainable values and penalties.
        loss: As `model.loss`: from outputs, labels and penalties to scalars by name,
            among them `total_loss`, each a mean over the batch.
        learning_rate: From the examples seen, int64 [], to the rate of the next update.
        average_decay: From `global_step` to the decay of the moving averages.
        activations: A view of the model that also returns activations, and their names,
            as `model.with_activations` makes it. None: no activations with summaries.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        *,
        inference: Inference,
        loss: Loss,
        learning_rate: Callable[[tf.Tensor], tf.Tensor],
        average_decay: Callable[[tf.Tensor], tf.Tensor],
        activations: tuple[keras.Model, list[str]] | None = None,
    ) -> None:
        self.state = state
        self.devices = tuple(devices)
        self._inference = inference
        self._loss = loss
        self._learning_rate = learning_rate
        self._average_decay = average_decay
        self._activations = activations
        self._warned: set[str] = set()
        self._step = tf.function(self._trace_step, autograph=False)

    def step(
        self, batches: Sequence[tuple[tf.Tensor, tf.Tensor]], *, summaries: bool = False
    ) -> StepResult:
        """Runs every tower on its batch and applies one synchronous update.

        Args:
            batches: One (inputs, labels) per tower, all of one shape.
            summaries: Whether to return gradients and activations too.
        """
        return StepResult(*self._step(list(batches), summaries))

    def graph(self, batches: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> tf.Graph:
        """Returns the graph of the step, for TensorBoard."""
        return self._step.get_concrete_function(list(batches), False).graph

    def _trace_step(
        self, batches: list[tuple[tf.Tensor, tf.Tensor]], summaries: bool
    ) -> tuple:
        if len({inputs.shape for inputs, _ in batches}) != 1:
            raise ValueError("The towers' batches have to be of one shape.")
        tower_metrics, tower_gradients, tower_statistics = [], [], []
        activations: dict[str, tf.Tensor] = {}
        for number, (device, (inputs, labels)) in enumerate(
            zip(self.devices, batches, strict=True)
        ):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                view = self._activations if summaries and number == 0 else None
                metrics, gradients, statistics, shown = self._tower(
                    number, inputs, labels, view
                )
            tower_metrics.append(metrics)
            tower_gradients.append(gradients)
            tower_statistics.append(statistics)
            activations |= shown

        # The synchronization point across all towers.
        variables = self.state.model.trainable_variables
        names = [variable.path for variable in variables]
        with tf.device(UPDATE_DEVICE), tf.name_scope("average"):
            gradients = average_gradients(tower_gradients, names)
            self._warn_of_missing(gradients, names)
            statistics = average_statistics(tower_statistics)
            metrics = {
                name: tf.add_n([metrics[name] for metrics in tower_metrics])
                / len(self.devices)
                for name in tower_metrics[0]
            }
            tower_losses = tf.stack(
                [metrics["total_loss"] for metrics in tower_metrics]
            )
        present = [
            (gradient, variable, name)
            for gradient, variable, name in zip(
                gradients, variables, names, strict=True
            )
            if gradient is not None
        ]
        with tf.device(UPDATE_DEVICE), tf.name_scope("update"):
            metrics["gradient_norm"] = tf.linalg.global_norm(
                [tf.convert_to_tensor(gradient) for gradient, _, _ in present]
            )
            global_batch_size = sum(inputs.shape[0] for inputs, _ in batches)
            rate = self._learning_rate(self.state.global_step * global_batch_size)
            metrics["learning_rate"] = rate
            self._update([one[:2] for one in present], statistics, rate)
        shown_gradients = (
            {name: tf.convert_to_tensor(gradient) for gradient, _, name in present}
            if summaries
            else {}
        )
        return metrics, tower_losses, shown_gradients, activations

    def _tower(
        self,
        number: int,
        inputs: tf.Tensor,
        labels: tf.Tensor,
        view: tuple[keras.Model, list[str]] | None,
    ) -> tuple[dict, list[Gradient], list[tf.Tensor | None], dict[str, tf.Tensor]]:
        """Computes one tower; reads the variables once and writes nothing."""
        model = self.state.model
        trainable = [
            tf.identity(variable.value) for variable in model.trainable_variables
        ]
        non_trainable = [
            _for_tower(variable, number) for variable in model.non_trainable_variables
        ]
        called, layer_names = view or (model, [])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            values = dict(
                zip(
                    map(id, model.trainable_variables + model.non_trainable_variables),
                    trainable + non_trainable,
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
        by_id = dict(
            zip(map(id, called.non_trainable_variables), statistics, strict=True)
        )
        return (
            metrics,
            tape.gradient(metrics["total_loss"], trainable),
            [by_id[id(variable)] for variable in model.non_trainable_variables],
            dict(zip(layer_names, shown, strict=True)),
        )

    def _update(
        self,
        gradients_and_variables: list[tuple[Gradient, keras.Variable]],
        statistics: list[tf.Tensor | None],
        rate: tf.Tensor,
    ) -> None:
        """Writes everything a step writes; nothing else in a step writes."""
        state = self.state
        learning_rate = state.optimizer.learning_rate
        learning_rate.assign(tf.cast(rate, learning_rate.dtype))
        gradients, variables = zip(*gradients_and_variables, strict=True)
        state.optimizer.apply(list(gradients), list(variables))
        for variable, value in zip(
            state.model.non_trainable_variables, statistics, strict=True
        ):
            if value is not None:
                variable.assign(value)
        decay = self._average_decay(state.global_step)
        for average, variable in zip(
            state.averages, state.model.trainable_variables, strict=True
        ):
            fresh = tf.cast(1.0 - decay, average.dtype)
            average.assign_sub(fresh * (average - variable.value))
        state.global_step.assign_add(1)

    def _warn_of_missing(self, gradients: Sequence[Gradient], names: list[str]) -> None:
        missing = [
            name
            for gradient, name in zip(gradients, names, strict=True)
            if gradient is None
        ]
        if len(missing) == len(names):
            raise UsageError(
                "The loss does not depend on any variable of the model: no tower has a "
                "gradient. Check that the model's output is computed from its layers."
            )
        if new := [name for name in missing if name not in self._warned]:
            self._warned.update(new)
            logger.warning(
                "These variables have no gradient and will not be trained: %s.",
                ", ".join(new),
            )


def average_gradients(
    tower_gradients: Sequence[Sequence[Gradient]], names: Sequence[str]
) -> list[Gradient]:
    """Averages each variable's gradient over all towers.

    With two towers and two variables a and b, whose gradients are

        tower 0: [a0, b0]
        tower 1: [a1, b1]

    the result is [(a0 + a1) / 2, (b0 + b1) / 2]. Every tower's loss is the mean over
    its own batch and all batches are of one size, so this is the gradient of the mean
    over the global batch: the only place where gradients are divided by the number of
    towers.

    Args:
        tower_gradients: `tower_gradients[tower][variable]`. Sparse gradients may be
            `tf.IndexedSlices`.
        names: The variables' names, for messages.

    Returns:
        One gradient per variable; sparse if it is so on every tower; None if it is None
        on every tower.

    Raises:
        ValueError: A variable has a gradient on some towers only.
    """
    averaged: list[Gradient] = []
    for name, gradients in zip(names, zip(*tower_gradients, strict=True), strict=True):
        without = [
            tower for tower, gradient in enumerate(gradients) if gradient is None
        ]
        if len(without) == len(gradients):
            averaged.append(None)
            continue
        if without:
            raise ValueError(
                f"Variable {name} has a gradient on some towers but none on towers "
                f"{without}. All towers must compute the same function."
            )
        averaged.append(_mean(gradients))
    return averaged


def average_statistics(
    tower_statistics: Sequence[Sequence[tf.Tensor | None]],
) -> list[tf.Tensor | None]:
    """Averages the new values of the non-trainable variables over all towers.

    Args:
        tower_statistics: `tower_statistics[tower][variable]`; None where a tower left
            the variable as it is.

    Returns:
        One value per variable: the mean for floating ones, such as batch statistics;
        the first tower's for others, such as counters and the state of random
        generators, which must advance once a step; None for those left as they are.
    """
    return [
        _mean(values)
        if values[0] is not None and values[0].dtype.is_floating
        else values[0]
        for values in zip(*tower_statistics, strict=True)
    ]


def _mean(
    values: Sequence[tf.Tensor | tf.IndexedSlices],
) -> tf.Tensor | tf.IndexedSlices:
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, tf.IndexedSlices) for value in values):
        # The slices of all towers side by side; equal indices add up when applied.
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], axis=0) / len(values),
            tf.concat([value.indices for value in values], axis=0),
            values[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(value) for value in values]) / len(values)


def _for_tower(variable: keras.Variable, number: int) -> tf.Tensor:
    """Reads a non-trainable variable; random generators differ from tower to tower."""
    value = tf.identity(variable.value)
    if number and variable.name == "seed_generator_state":
        offset = (number * _TOWER_SEED_STRIDE) % 2**32
        value += tf.constant([offset, 0], value.dtype)
    return value
