"""Sectioned towers: less memory for more time.

A cycle computes a model's sections one after another and keeps only the boundary
tensors between them. The forward and backward pass of the last section are one; then
the others follow backwards, each recomputing its forward pass. All writing is in the
one synchronous update at the end, as with other towers.

A tower may compute several batches before an update, one cycle after another; they
count as if each had a tower of its own.
"""

from collections.abc import Sequence

import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.cycle import run_cycle
from cifar10.sections.tower import SectionTower
from cifar10.towers.towers import (
    Batch,
    StepResult,
    Tower,
    TowerBuilder,
    TowerResult,
    average_gradients,
    check_shapes,
    read_for_tower,
    total,
)
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient, Update, scaled


class SectionedBuilder(TowerBuilder):
    """Builds the synchronous step over towers that compute section by section.

    Each tower computes `accumulate` batches before an update. Boundary tensors wait on
    `cache_device`; with None where they are computed. `self.devices` has the device of
    a tower once for each of its batches.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        *,
        tower: Tower,
        update: Update,
        sections: Sequence[Section],
        accumulate: int = 1,
        cache_device: str | None = None,
    ) -> None:
        super().__init__(
            state,
            [device for device in devices for _ in range(accumulate)],
            tower=tower,
            update=update,
        )
        if accumulate > 1:
            self.tower_names = tuple(
                f"{device}, batch {number}"
                for device in devices
                for number in range(accumulate)
            )
        self._accumulate = accumulate
        compute = SectionTower(state, tower.inference, tower.loss, cache_device)
        self._functions = [
            compute.functions(sections, number, device)
            for number, device in enumerate(devices)
        ]

    def trace_step(self, batches: list[Batch], return_gradients: bool) -> StepResult:
        """Builds the operations of a step: a cycle for each batch, and one update."""
        results = self._trace_results(batches)
        sums: list[list[Gradient]] = []
        for number, (device, result) in enumerate(
            zip(self.devices, results, strict=True)
        ):
            if number % self._accumulate == 0:
                sums.append(result.gradients)
                continue
            with tf.device(device):
                pairs = zip(sums[-1], result.gradients, strict=True)
                sums[-1] = [total(pair) for pair in pairs]
        # The synchronization point: each tower waits here for all others.
        with tf.device(self.state.device), tf.name_scope("average"):
            means = average_gradients(sums, self._names)
            if self._accumulate > 1:
                share = 1.0 / self._accumulate
                means = [
                    mean if mean is None else scaled(mean, share) for mean in means
                ]
            averages = self._averages(means, results, batches)
        return self._trace_update(self.state, averages, return_gradients)

    def _trace_results(self, batches: list[Batch]) -> list[TowerResult]:
        check_shapes(batches)
        model = self.state.model
        results: list[TowerResult] = []
        for number, (device, batch) in enumerate(
            zip(self.devices, batches, strict=True)
        ):
            tower, place = divmod(number, self._accumulate)
            # The cycles of a tower run one after another.
            earlier = results[-1].gradients if place else []
            with (
                tf.device(device),
                tf.control_dependencies([g for g in earlier if g is not None]),
            ):
                values = [
                    # Random generators differ as if each batch had its own tower.
                    read_for_tower(variable, number)
                    for variable in model.non_trainable_variables
                ]
                results.append(run_cycle(model, self._functions[tower], values, batch))
        return results
