"""Sectioned towers: less memory for more time.

A cycle computes a model's sections one after another and keeps only the boundary
tensors between them. The last section's forward and backward pass are one; then the
others follow backwards, each computing its forward pass once more. All writing is in
the one synchronous update at the end, as it is of other towers.

A tower may compute several batches before an update, one cycle after another; they
count as if each had a tower of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeAlias

import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.cycle import Cycle, CycleResult, parts_of
from cifar10.sections.functions import Functions
from cifar10.sections.tower import total
from cifar10.towers.averaging import (
    Averages,
    Gradient,
    average_gradients,
    average_statistics,
    scaled,
)
from cifar10.towers.builder import Batch, TowerBuilder
from cifar10.towers.tower import Tower, TowerResult, checksum, for_tower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

# A tower's, by variable: one gradient from each section that uses it.
Gradients: TypeAlias = "list[list[Gradient]]"


class SectionedBuilder(TowerBuilder):
    """Builds the synchronous step over towers that compute section by section.

    Args:
        state: What the step updates.
        devices: One device name per tower.
        tower: What each tower computes, for the graph of a step.
        update: What the averages of all towers are given to.
        sections: The model's sections, in their order.
        functions: What computes them.
        accumulate: Batches that a tower computes before an update.

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
        functions: Functions,
        accumulate: int = 1,
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
        self._functions = functions
        self._begin = tf.function(self._trace_begin, autograph=False)
        self._add = tf.function(self._trace_add, autograph=False)
        self._finish = tf.function(self._trace_finish, autograph=False)

    def wrapped(self, wrap: Callable[[Any], Any]) -> Self:
        """Returns a builder whose step calls what `wrap` makes of each function."""
        builder = super().wrapped(wrap)
        vars(builder).update(
            _step=builder._trace_step,  # noqa: SLF001 - of the same class.
            _begin=wrap(self._begin),
            _functions=self._functions.wrapped(wrap),
            _add=wrap(self._add),
            _finish=wrap(self._finish),
        )
        return builder

    def _trace_step(self, batches: list[Batch], summaries: bool) -> tuple:
        """Runs a cycle of every tower for each of its batches, and one update."""
        return self._finish(*self._run(batches), batches[0][0].shape[0], summaries)

    def _trace_phase(self, batches: list[Batch], average: bool) -> tf.Tensor:
        gradients, statistics, _ = self._run(batches)
        if not average:
            sums = self._sums(gradients)
            return checksum([one for of_tower in sums for one in of_tower])
        with tf.device(self.state.device):
            means, averaged = self._means(gradients, statistics)
            return checksum([*means, *averaged])

    def _trace_results(self, batches: list[Batch]) -> list[TowerResult]:
        found: dict[int, TowerResult] = {}
        for places, cycles in self._cycles(batches):
            for place, cycle in zip(places, cycles, strict=True):
                gradients = [total(one) for one in cycle.gradients]
                found[place] = TowerResult(
                    cycle.metrics, gradients, cycle.statistics, {}
                )
        return [found[place] for place in range(self.number)]

    def _run(
        self, batches: Sequence[Batch]
    ) -> tuple[list[Gradients], list[list], list[dict[str, tf.Tensor]]]:
        """Computes every batch.

        Returns:
            The gradients of each tower, from all its batches; statistics and metrics of
            each batch.
        """
        gradients: list[Gradients] = []
        statistics: dict[int, list] = {}
        metrics: dict[int, dict] = {}
        for places, cycles in self._cycles(batches):
            new = [cycle.gradients for cycle in cycles]
            gradients = self._add(gradients, new) if gradients else new
            statistics |= zip(places, [one.statistics for one in cycles], strict=True)
            metrics |= zip(places, [one.metrics for one in cycles], strict=True)
        return (
            gradients,
            [statistics[place] for place in range(self.number)],
            [metrics[place] for place in range(self.number)],
        )

    def _cycles(
        self, batches: Sequence[Batch]
    ) -> Iterator[tuple[range, list[CycleResult]]]:
        """Runs one cycle of all towers after another; yields the batches' places."""
        if len({inputs.shape for inputs, _ in batches}) != 1:
            raise ValueError("The towers' batches have to be of one shape.")
        starts = self._begin()
        before: list[Any] = []
        for first in range(self._accumulate):
            places = range(first, self.number, self._accumulate)
            with tf.control_dependencies(before):  # One after another.
                cycles = Cycle(
                    self._parts,
                    self._functions,
                    [starts[place] for place in places],
                    [batches[place] for place in places],
                ).run()
            gradients = tf.nest.flatten([cycle.gradients for cycle in cycles])
            before = [one for one in gradients if one is not None]
            yield places, cycles

    def _trace_begin(self) -> list[list[tf.Tensor]]:
        """Reads the non-trainable variables, for each batch as if on its own tower."""
        values = []
        for number, device in enumerate(self.devices):
            with tf.device(device):
                values.append(
                    [
                        for_tower(variable, number)
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
                sums.append([[total([*one, *more])] for one, more in pairs])
        return sums

    def _sums(self, gradients: list[Gradients]) -> list[list[Gradient]]:
        """Returns each tower's gradients, computed where the tower is."""
        sums = []
        for tower, device in enumerate(self._tower_devices):
            with tf.device(device):
                sums.append([total(of_variable) for of_variable in gradients[tower]])
        return sums

    def _means(
        self, gradients: list[Gradients], statistics: list[list]
    ) -> tuple[list[Gradient], list[tf.Tensor | None]]:
        means = average_gradients(self._sums(gradients), self._names())
        share = 1.0 / self._accumulate
        if self._accumulate > 1:
            means = [None if one is None else scaled(one, share) for one in means]
        return means, average_statistics(statistics)

    def _trace_finish(
        self,
        gradients: list[Gradients],
        statistics: list[list],
        metrics: list[dict[str, tf.Tensor]],
        batch_size: int,
        summaries: bool,
    ) -> tuple:
        # The synchronization point across all towers.
        with tf.device(self.state.device), tf.name_scope("average"):
            means, averaged = self._means(gradients, statistics)
            self._warn_of_missing(means)
            averages = Averages(
                means,
                averaged,
                {
                    name: tf.add_n([one[name] for one in metrics]) / self.number
                    for name in metrics[0]
                },
                tf.stack([one["total_loss"] for one in metrics]),
                {},
                batch_size * self.number,
            )
        return self._trace_update(self.state, averages, summaries=summaries)
