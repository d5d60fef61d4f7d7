"""Sectioned towers: less memory for more time.

A cycle computes a model's sections one after another and keeps only the boundary
tensors between them. The forward and backward pass of the last section are one; then
the others follow backwards, each recomputing its forward pass. All writing is in the
one synchronous update at the end, as with other towers.
"""

from collections.abc import Sequence

import tensorflow as tf

from cifar10.sections import cutting
from cifar10.sections.cycle import run_cycle
from cifar10.sections.tower import SectionFunctions, SectionTower
from cifar10.towers.towers import Tower, TowerResult, read_for_tower
from cifar10.towers.train_state import TrainState


class SectionedTower(Tower):
    """A tower that computes what another one does, section by section.

    Every model that it is called with, one for each set of variables, is cut at the
    same `places`, as `cutting.cut` takes them; without any the whole model is one
    section. Boundary tensors wait on `cache_device`; with None where they are computed.
    """

    def __init__(
        self, tower: Tower, places: Sequence[int], cache_device: str | None = None
    ) -> None:
        super().__init__(tower.inference, tower.loss, xla=tower.xla)
        self._places = places
        self._cache_device = cache_device
        self._functions: dict[tuple[TrainState, str], SectionFunctions] = {}

    def __call__(
        self, state: TrainState, number: int, inputs: tf.Tensor, labels: tf.Tensor
    ) -> TowerResult:
        """Computes a cycle; the arguments are those of `Tower`."""
        model = state.model
        # The device with its worker: the body of a function does not inherit it.
        labels = tf.identity(labels)
        key = state, labels.device
        if key not in self._functions:
            compute = SectionTower(state, self, self._cache_device)
            sections: Sequence[cutting.Section] = [cutting.WholeModel(model)]
            if self._places:
                calls = cutting.calls_of(model)
                sections = cutting.cut(model, calls, self._places)
            self._functions[key] = compute.functions(sections, labels.device)
        values = [
            read_for_tower(variable, number)
            for variable in model.non_trainable_variables
        ]
        return run_cycle(model, self._functions[key], values, (inputs, labels))
