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
import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from cifar10.averaging import Gradient, average_gradients, average_statistics
from cifar10.errors import UsageError
from cifar10.train_state import TrainState

Batch: TypeAlias = "tuple[tf.Tensor, tf.Tensor]"
Inference = Callable[..., tuple]
Loss = Callable[..., dict[str, tf.Tensor]]

# Sets the towers' dropout masks apart; odd, so that no two towers below 2^32 coincide.
_TOWER_SEED_STRIDE = 0x9E3779B1

logger = logging.getLogger(__name__)


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


class _Tower(NamedTuple):
    """What one tower computes; see `StepResult`."""

    metrics: dict[str, tf.Tensor]
    gradients: list[Gradient]
    statistics: list[tf.Tensor | None]
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
        xla: Whether to compile each tower with XLA.
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
        xla: bool = False,
    ) -> None:
        self.state = state
        self.devices = tuple(devices)
        self._inference = inference
        self._loss = loss
        self._learning_rate = learning_rate
        self._average_decay = average_decay
        self._activations = activations
        self._xla = xla
        self._warned: set[str] = set()
        self._step = tf.function(self._trace_step, autograph=False)
        self._steps = tf.function(self._trace_steps, autograph=False)
        self._phase = tf.function(self._trace_phase, autograph=False)

    def step(self, batches: Sequence[Batch], *, summaries: bool = False) -> StepResult:
        """Runs every tower on its batch and applies one synchronous update.

        Args:
            batches: One (inputs, labels) per tower, all of one shape.
            summaries: Whether to return gradients and activations too.
        """
        return StepResult(*self._step(list(batches), summaries))

    def steps(self, batches: Sequence[Sequence[Batch]]) -> StepResult:
        """Runs several steps in one call, without returning to Python in between.

        Args:
            batches: `batches[step][tower]`, each (inputs, labels), all of one shape.

        Returns:
            The results, each with a leading dimension of steps.
        """
        stacked = []
        for device, of_tower in zip(
            self.devices, zip(*batches, strict=True), strict=True
        ):
            with tf.device(device):
                inputs, labels = zip(*of_tower, strict=True)
                stacked.append((tf.stack(inputs), tf.stack(labels)))
        metrics, tower_losses = self._steps(stacked)
        return StepResult(metrics, tower_losses, {}, {})

    def phase(self, batches: Sequence[Batch], *, average: bool) -> None:
        """Runs the first phases of a step and waits for them; nothing is updated.

        Args:
            batches: As in `step`.
            average: Whether to average the towers' gradients too.
        """
        self._phase(list(batches), average).numpy()

    def graph(self, batches: Sequence[Batch]) -> tf.Graph:
        """Returns the graph of the step, for TensorBoard."""
        return self._step.get_concrete_function(list(batches), False).graph

    def _trace_steps(
        self, stacked: list[Batch]
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        def batches_of(number: tf.Tensor | int) -> list[Batch]:
            batches = []
            for device, (inputs, labels) in zip(self.devices, stacked, strict=True):
                with tf.device(device):
                    batches.append((inputs[number], labels[number]))
            return batches

        def one_step(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            metrics, tower_losses, _, _ = self._trace_step(batches_of(number), False)
            return metrics, tower_losses

        single = self._step.get_concrete_function(batches_of(0), False)
        return tf.map_fn(
            one_step,
            tf.range(stacked[0][0].shape[0]),
            parallel_iterations=1,  # A step begins with what the one before has left.
            fn_output_signature=tf.nest.map_structure(
                lambda output: tf.TensorSpec(output.shape, output.dtype),
                single.structured_outputs[:2],
            ),
        )

    def _trace_phase(self, batches: list[Batch], average: bool) -> tf.Tensor:
        towers = self._trace_towers(batches, summaries=False)
        if average:
            with tf.device(self.state.device):
                gradients, statistics = self._average(towers)
                return _checksum([*gradients, *statistics])
        return _checksum(
            [value for tower in towers for value in tower.gradients + tower.statistics]
        )

    def _trace_step(self, batches: list[Batch], summaries: bool) -> tuple:
        towers = self._trace_towers(batches, summaries=summaries)
        # The synchronization point across all towers.
        names = [variable.path for variable in self.state.model.trainable_variables]
        with tf.device(self.state.device), tf.name_scope("average"):
            gradients, statistics = self._average(towers)
            self._warn_of_missing(gradients, names)
            metrics = {
                name: tf.add_n([tower.metrics[name] for tower in towers]) / len(towers)
                for name in towers[0].metrics
            }
            tower_losses = tf.stack([tower.metrics["total_loss"] for tower in towers])
        present = [
            (gradient, variable)
            for gradient, variable in zip(
                gradients, self.state.model.trainable_variables, strict=True
            )
            if gradient is not None
        ]
        with tf.device(self.state.device), tf.name_scope("update"):
            global_batch_size = sum(inputs.shape[0] for inputs, _ in batches)
            rate = self._learning_rate(self.state.global_step * global_batch_size)
            metrics |= self._gradient_metrics([gradient for gradient, _ in present])
            metrics["learning_rate"] = rate
            self._update(present, statistics, rate)
        shown_gradients = (
            {
                variable.path: tf.convert_to_tensor(gradient) / metrics["loss_scale"]
                if "loss_scale" in metrics
                else tf.convert_to_tensor(gradient)
                for gradient, variable in present
            }
            if summaries
            else {}
        )
        return metrics, tower_losses, shown_gradients, towers[0].activations

    def _trace_towers(self, batches: list[Batch], *, summaries: bool) -> list[_Tower]:
        if len({inputs.shape for inputs, _ in batches}) != 1:
            raise ValueError("The towers' batches have to be of one shape.")
        towers = []
        for number, (device, (inputs, labels)) in enumerate(
            zip(self.devices, batches, strict=True)
        ):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                view = self._activations if summaries and number == 0 else None
                towers.append(self._tower(number, inputs, labels, view))
        return towers

    def _average(
        self, towers: Sequence[_Tower]
    ) -> tuple[list[Gradient], list[tf.Tensor | None]]:
        names = [variable.path for variable in self.state.model.trainable_variables]
        return (
            average_gradients([tower.gradients for tower in towers], names),
            average_statistics([tower.statistics for tower in towers]),
        )

    def _gradient_metrics(self, gradients: Sequence[Gradient]) -> dict[str, tf.Tensor]:
        """Returns the norm of all gradients and, in float16, the factor of the loss."""
        norm = tf.linalg.global_norm([tf.convert_to_tensor(one) for one in gradients])
        if not isinstance(self.state.optimizer, keras.optimizers.LossScaleOptimizer):
            return {"gradient_norm": norm}
        scale = tf.cast(self.state.optimizer.scale_loss(1.0), norm.dtype)
        # The optimizer passes over an update that overflows and lowers the factor.
        norm = tf.where(tf.math.is_finite(norm), norm / scale, 0.0)
        return {"gradient_norm": norm, "loss_scale": scale}

    def _tower(
        self,
        number: int,
        inputs: tf.Tensor,
        labels: tf.Tensor,
        view: tuple[keras.Model, list[str]] | None,
    ) -> _Tower:
        """Reads the variables once, and computes one tower from their values."""
        model = self.state.model
        trainable = [
            tf.identity(variable.value) for variable in model.trainable_variables
        ]
        non_trainable = [
            _for_tower(variable, number) for variable in model.non_trainable_variables
        ]
        scale = tf.convert_to_tensor(self.state.optimizer.scale_loss(1.0))
        compute = functools.partial(self._compute, view=view)
        if self._xla:
            compute = tf.function(compute, jit_compile=True, autograph=False)
        return _Tower(*compute(trainable, non_trainable, inputs, labels, scale))

    def _compute(
        self,
        trainable: list[tf.Tensor],
        non_trainable: list[tf.Tensor],
        inputs: tf.Tensor,
        labels: tf.Tensor,
        scale: tf.Tensor,
        *,
        view: tuple[keras.Model, list[str]] | None,
    ) -> tuple[dict, list[Gradient], list[tf.Tensor | None], dict[str, tf.Tensor]]:
        """Computes one tower as a pure function of tensors."""
        model = self.state.model
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
            if isinstance(self.state.optimizer, keras.optimizers.LossScaleOptimizer):
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


def _for_tower(variable: keras.Variable, number: int) -> tf.Tensor:
    """Reads a non-trainable variable; random generators differ from tower to tower."""
    value = tf.identity(variable.value)
    if number and variable.name == "seed_generator_state":
        offset = (number * _TOWER_SEED_STRIDE) % 2**32
        value += tf.constant([offset, 0], value.dtype)
    return value


def _checksum(values: Sequence[Gradient]) -> tf.Tensor:
    """Returns a number that depends on every value, so that none is left out."""
    return tf.add_n(
        [
            tf.cast(tf.reshape(tf.convert_to_tensor(value), [-1])[0], tf.float64)
            for value in values
            if value is not None
        ]
    )
