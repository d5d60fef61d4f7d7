"""Sectioned towers: less memory for more time.

A cycle computes a model's sections one after another and keeps only the boundary
tensors between them. The forward and backward pass of the last section are one; then
the others follow backwards, each recomputing its forward pass. All writing is in the
one synchronous update at the end, as with other towers.

A tower may compute several batches before an update, one cycle after another; they
count as if each had a tower of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.cycle import Cycle, CycleResult, parts_of
from cifar10.sections.functions import SectionFunctions, Wrap
from cifar10.sections.tower import total
from cifar10.towers.towers import (
    Averages,
    Batch,
    StepResult,
    Tower,
    TowerBuilder,
    TowerResult,
    average_gradients,
    average_statistics,
    check_shapes,
    read_for_tower,
)
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient, Update, scaled

# `gradients[variable]` of a tower: one from each section that uses the variable.
Gradients: TypeAlias = "list[list[Gradient]]"


class SectionedBuilder(TowerBuilder):
    """Builds the synchronous step over towers that compute section by section.

    Args:
        state: What the step updates.
        devices: One device name per tower.
        tower: What each tower computes, for the graph that TensorBoard shows.
        update: What the averages of all towers are given to.
        sections: The model's sections, in their order.
        functions: Builds the functions that compute them.
        accumulate: Batches that a tower computes before an update.
        wrap: Makes of each `tf.function` what a step calls in its place. With it a step
            is not traced as a whole, but runs its functions one by one.

    Attributes:
        devices: As in `TowerBuilder`, each once for every batch of its tower.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        *,
        tower: Tower,
        update: Update,
        sections: Sequence[Section],
        functions: SectionFunctions,
        accumulate: int = 1,
        wrap: Wrap | None = None,
    ) -> None:
        super().__init__(
            state,
            [device for device in devices for _ in range(accumulate)],
            tower=tower,
            update=update,
        )
        self._tower_devices = tuple(devices)
        if accumulate > 1:
            self.tower_names = tuple(
                f"{device}, batch {number}"
                for device in devices
                for number in range(accumulate)
            )
        self._accumulate = accumulate
        self._parts = parts_of(state.model, sections)

        def call(function: Any) -> Any:
            return wrap(function) if wrap else function

        self._functions = functions.build(sections, call)
        self._begin = call(tf.function(self._trace_begin, autograph=False))
        self._add = call(tf.function(self._trace_add, autograph=False))
        self._finish = call(tf.function(self._trace_finish, autograph=False))

    def run(self, batches: Sequence[Batch]) -> StepResult:
        """Runs a step function by function, without tracing it as a whole.

        Args:
            batches: As in `step`, or what the wrapped functions take in their place.
        """
        return self.trace_step(list(batches), False)

    def trace_step(self, batches: list[Batch], return_gradients: bool) -> StepResult:
        """Runs a cycle of every tower for each of its batches, and one update."""
        batch_size = batches[0][0].shape[0]
        return self._finish(*self._run(batches), batch_size, return_gradients)

    def _trace_results(self, batches: list[Batch]) -> list[TowerResult]:
        results: dict[int, TowerResult] = {}
        for places, cycles in self._cycles(batches):
            for place, cycle in zip(places, cycles, strict=True):
                gradients = [total(gradients) for gradients in cycle.gradients]
                results[place] = TowerResult(cycle.metrics, gradients, cycle.statistics)
        return [results[place] for place in range(self.num_towers)]

    def _run(
        self, batches: Sequence[Batch]
    ) -> tuple[list[Gradients], list[list], list[dict[str, tf.Tensor]]]:
        """Computes every batch.

        Returns:
            The gradients of each tower, from all its batches; the statistics and the
            metrics of each batch.
        """
        gradients: list[Gradients] = []
        statistics: dict[int, list] = {}
        metrics: dict[int, dict] = {}
        for places, cycles in self._cycles(batches):
            new = [cycle.gradients for cycle in cycles]
            gradients = self._add(gradients, new) if gradients else new
            for place, cycle in zip(places, cycles, strict=True):
                statistics[place] = cycle.statistics
                metrics[place] = cycle.metrics
        places = range(self.num_towers)
        return (
            gradients,
            [statistics[place] for place in places],
            [metrics[place] for place in places],
        )

    def _cycles(
        self, batches: Sequence[Batch]
    ) -> Iterator[tuple[range, list[CycleResult]]]:
        """Runs one cycle of all towers after another; yields the batches' places."""
        check_shapes(batches)
        starts = self._begin()
        earlier: list[Any] = []
        for first in range(self._accumulate):
            places = range(first, self.num_towers, self._accumulate)
            with tf.control_dependencies(earlier):  # One cycle after another.
                cycles = Cycle(
                    self._parts,
                    self._functions,
                    [starts[place] for place in places],
                    [batches[place] for place in places],
                ).run()
            gradients = tf.nest.flatten([cycle.gradients for cycle in cycles])
            earlier = [gradient for gradient in gradients if gradient is not None]
            yield places, cycles

    def _trace_begin(self) -> list[list[tf.Tensor]]:
        """Reads the non-trainable variables, for each batch as if on its own tower."""
        values = []
        for number, device in enumerate(self.devices):
            with tf.device(device):
                values.append(
                    [
                        read_for_tower(variable, number)
                        for variable in self.state.model.non_trainable_variables
                    ]
                )
        return values

    def _trace_add(
        self, earlier: list[Gradients], new: list[Gradients]
    ) -> list[Gradients]:
        """Adds up each tower's gradients, from all sections and batches so far."""
        sums = []
        for tower, device in enumerate(self._tower_devices):
            with tf.device(device):
                pairs = zip(earlier[tower], new[tower], strict=True)
                sums.append([[total([*before, *after])] for before, after in pairs])
        return sums

    def _trace_finish(
        self,
        gradients: list[Gradients],
        statistics: list[list],
        metrics: list[dict[str, tf.Tensor]],
        batch_size: int,
        return_gradients: bool,
    ) -> tuple:
        sums = []
        for tower, device in enumerate(self._tower_devices):
            with tf.device(device):
                sums.append([total(parts) for parts in gradients[tower]])
        names = [variable.path for variable in self.state.model.trainable_variables]
        # The synchronization point across all towers.
        with tf.device(self.state.device), tf.name_scope("average"):
            means = average_gradients(sums, names)
            if self._accumulate > 1:
                share = 1.0 / self._accumulate
                means = [
                    mean if mean is None else scaled(mean, share) for mean in means
                ]
            self._warn_of_missing(means, names)
            averages = Averages(
                means,
                average_statistics(statistics),
                {
                    name: tf.add_n([values[name] for values in metrics])
                    / self.num_towers
                    for name in metrics[0]
                },
                tf.stack([values["total_loss"] for values in metrics]),
                batch_size * self.num_towers,
            )
        return self._trace_update(self.state, averages, return_gradients)
