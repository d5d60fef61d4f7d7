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

import copy
import logging
from collections.abc import Callable, Sequence
from signal import Signals
from typing import Any, Self, TypeAlias

import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers.averaging import (
    Averages,
    Gradient,
    average_gradients,
    average_statistics,
)
from cifar10.towers.step_result import StepResult
from cifar10.towers.tower import Tower, TowerResult, checksum
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

Batch: TypeAlias = "tuple[tf.Tensor, tf.Tensor]"

logger = logging.getLogger(__name__)


class TowerBuilder:
    """Builds the synchronous step over towers on several devices.

    Args:
        state: What the step updates.
        devices: One device name per tower.
        tower: What each tower computes.
        update: What the averages of all towers are given to.

    Attributes:
        first: The number of this process's first tower.
        number: How many towers there are, on all machines together.
        reduces: Whether a step also averages over other sets of variables.
        tower_names: What to call each of them in messages.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        *,
        tower: Tower,
        update: Update,
    ) -> None:
        self.state = state
        self.devices = tuple(devices)
        self.first = 0
        self.number = len(self.devices)
        self.reduces = False
        self.tower_names = self.devices
        self._tower = tower
        self._update = update
        self._warned: set[str] = set()
        self._step = tf.function(self._trace_step, autograph=False)
        self._steps = tf.function(self._trace_steps, autograph=False)
        self._phase = tf.function(self._trace_phase, autograph=False)
        self._results = tf.function(self._trace_results, autograph=False)

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

    def agreed_to_stop(self, own: Signals | None) -> Signals | None:
        """Returns the signal on which a run ends here; with one process, its own."""
        return own

    def synchronize(self, numbers: Sequence[int]) -> list[int]:
        """Gives all sets of variables the first one's values; here there is one.

        Args:
            numbers: Some integers.

        Returns:
            Those of the first process.
        """
        self.state.halted.assign(False)
        return list(numbers)

    def wait_for_all(self) -> None:
        """Waits for the other processes; here there is none."""

    def phase(self, batches: Sequence[Batch], *, average: bool) -> None:
        """Runs the first phases of a step and waits for them; nothing is updated.

        Args:
            batches: As in `step`.
            average: Whether to average the towers' gradients too.
        """
        self._phase(list(batches), average).numpy()

    def results(self, batches: Sequence[Batch]) -> list[TowerResult]:
        """Runs every tower on its batch; nothing is averaged or updated.

        Args:
            batches: As in `step`.
        """
        return self._results(list(batches))

    def graph(self, batches: Sequence[Batch]) -> tf.Graph:
        """Returns the graph of the step, for TensorBoard."""
        return self._step.get_concrete_function(list(batches), False).graph

    def wrapped(self, wrap: Callable[[Any], Any]) -> Self:
        """Returns a builder whose step calls what `wrap` makes of each function."""
        vars(builder := copy.copy(self)).update(_step=wrap(self._step))
        return builder

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
        towers = self._trace_towers(self.state, self.devices, batches)
        if average:
            with tf.device(self.state.device):
                gradients, statistics = self._average(towers)
                return checksum([*gradients, *statistics])
        return checksum(
            [value for tower in towers for value in tower.gradients + tower.statistics]
        )

    def _trace_results(self, batches: list[Batch]) -> list[TowerResult]:
        return self._trace_towers(self.state, self.devices, batches, first=self.first)

    def _trace_step(self, batches: list[Batch], summaries: bool) -> tuple:
        averages = self._trace_averages(
            self.state, self.devices, batches, summaries=summaries
        )
        return self._trace_update(self.state, averages, summaries=summaries)

    def _trace_averages(
        self,
        state: TrainState,
        devices: Sequence[str],
        batches: list[Batch],
        *,
        first: int = 0,
        summaries: bool = False,
    ) -> Averages:
        """Builds towers that share one set of variables, and their averages.

        Args:
            state: The variables.
            devices: One device name per tower.
            batches: One (inputs, labels) per tower.
            first: The number of the first of these towers among all.
            summaries: Whether to return activations too.
        """
        towers = self._trace_towers(
            state, devices, batches, first=first, summaries=summaries
        )
        # The synchronization point across these towers.
        with tf.device(state.device), tf.name_scope("average"):
            gradients, statistics = self._average(towers)
            self._warn_of_missing(gradients)
            return Averages(
                gradients,
                statistics,
                {
                    name: tf.add_n([tower.metrics[name] for tower in towers])
                    / len(towers)
                    for name in towers[0].metrics
                },
                tf.stack([tower.metrics["total_loss"] for tower in towers]),
                towers[0].activations,
                batches[0][0].shape[0] * self.number,
            )

    def _trace_update(
        self, state: TrainState, averages: Averages, *, summaries: bool
    ) -> tuple:
        with tf.device(state.device), tf.name_scope("update"):
            metrics = averages.metrics | self._update(
                state,
                averages.gradients,
                averages.statistics,
                averages.tower_losses,
                averages.global_batch_size,
            )
        shown = {}
        if summaries:
            scale = metrics.get("loss_scale", 1.0)
            shown = {
                variable.path: tf.convert_to_tensor(gradient) / scale
                for gradient, variable in zip(
                    averages.gradients, state.model.trainable_variables, strict=True
                )
                if gradient is not None
            }
        return metrics, averages.tower_losses, shown, averages.activations

    def _trace_towers(
        self,
        state: TrainState,
        devices: Sequence[str],
        batches: list[Batch],
        *,
        first: int = 0,
        summaries: bool = False,
    ) -> list[TowerResult]:
        if len({inputs.shape for inputs, _ in batches}) != 1:
            raise ValueError("The towers' batches have to be of one shape.")
        towers = []
        for number, (device, (inputs, labels)) in enumerate(
            zip(devices, batches, strict=True), start=first
        ):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                shows = summaries and state is self.state and number == first
                towers.append(
                    self._tower(state, number, inputs, labels, summaries=shows)
                )
        return towers

    def _average(
        self, towers: Sequence[TowerResult]
    ) -> tuple[list[Gradient], list[tf.Tensor | None]]:
        return (
            average_gradients([tower.gradients for tower in towers], self._names()),
            average_statistics([tower.statistics for tower in towers]),
        )

    def _names(self) -> list[str]:
        return [variable.path for variable in self.state.model.trainable_variables]

    def _warn_of_missing(self, gradients: Sequence[Gradient]) -> None:
        missing = [
            name
            for gradient, name in zip(gradients, self._names(), strict=True)
            if gradient is None
        ]
        if len(missing) == len(gradients):
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
