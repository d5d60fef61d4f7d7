"""Sectioned towers: less memory for more time.

A cycle computes a model's sections one after another and keeps only the boundary
tensors between them. The forward and backward pass of the last section are one; then
the others follow backwards, each recomputing its forward pass. All writing is in the
one synchronous update at the end, as with other towers.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar10.sections import cutting
from cifar10.sections.cutting import Section
from cifar10.sections.tower import Backward, SectionFunctions, SectionTower
from cifar10.towers import freezing
from cifar10.towers.towers import Batch, Tower, TowerResult, read_for_tower, total
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient


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
        self._functions: dict[tuple, SectionFunctions] = {}

    def __call__(
        self, state: TrainState, number: int, inputs: tf.Tensor, labels: tf.Tensor
    ) -> TowerResult:
        """Computes a cycle; the arguments are those of `Tower`."""
        model = state.model
        # The device with its worker: the body of a function does not inherit it.
        labels = tf.identity(labels)
        # Batch normalization that is frozen computes something else.
        key = state, labels.device, tuple(self.frozen)
        if key not in self._functions:
            compute = SectionTower(state, self)
            sections: Sequence[Section] = [cutting.WholeModel(model)]
            if self._places:
                calls = cutting.calls_of(model)
                sections = cutting.cut(model, calls, self._places)
            self._functions[key] = compute.functions(sections, labels.device)
        values = [
            read_for_tower(variable, number)
            for variable in model.non_trainable_variables
        ]
        result = _run_cycle(
            model, self._functions[key], values, (inputs, labels), self._cache_device
        )
        is_frozen = freezing.frozen(model, model.trainable_variables, self.frozen)
        for place, frozen in enumerate(is_frozen):
            if frozen:
                result.gradients[place] = None
        return result


def _run_cycle(
    model: keras.Model,
    functions: SectionFunctions,
    values: Iterable[tf.Tensor],
    batch: Batch,
    cache_device: str | None,
) -> TowerResult:
    """Computes all sections of a tower forward, and then all of them backward.

    The non-trainable variables of `model` have these `values` at the start. A boundary
    tensor is in memory until the last function that takes it has run, like any tensor
    of a graph.
    """

    def cached_copy(tensor: tf.Tensor) -> tf.Tensor:
        # Not within a function, whose results are placed where it is called.
        with tf.device(cache_device or tensor.device):
            return tf.identity(tensor, "cached")

    *earlier, last = functions.sections
    inputs, labels = batch
    start = _by_id(model.non_trainable_variables, values)
    changed: dict[int, tf.Tensor] = {}
    starts: list[list[tf.Tensor]] = []
    penalties: list[list[tf.Tensor]] = []
    # A subclassed model may declare no inputs.
    declared = model.inputs if earlier else last.input_tensors
    live = _by_id(declared, tf.nest.flatten(inputs))
    cached: dict[int, tf.Tensor] = {}
    for section, forward in zip(earlier, functions.forward, strict=True):
        variables = section.non_trainable_variables
        starts.append(_values_of(variables, start | changed))
        computed = forward(starts[-1], _values_of(section.input_tensors, live))
        live |= _by_id(section.output_tensors, computed.outputs)
        cached |= _by_id(section.output_tensors, map(cached_copy, computed.outputs))
        changed |= _by_id(variables, computed.statistics)
        penalties.append(computed.penalties)

    metrics, statistics, backward, penalty_gradients = functions.last(
        _values_of(last.non_trainable_variables, start | changed),
        _values_of(last.input_tensors, live),
        labels,
        penalties,
    )
    changed |= _by_id(last.non_trainable_variables, statistics)
    # One from each section that uses the variable or the boundary tensor, by its id.
    gradients: dict[int, list[Gradient]] = collections.defaultdict(list)

    def keep(section: Section, backward: Backward) -> None:
        tensors = [*section.trainable_variables, *section.input_tensors]
        for key, gradient in _by_id(tensors, [*backward[0], *backward[1]]).items():
            gradients[key].append(gradient)

    keep(last, backward)
    for number in reversed(range(len(earlier))):
        section = earlier[number]
        upstream = [gradients[id(tensor)] for tensor in section.output_tensors]
        due = [one for several in upstream for one in several if one is not None]
        # Otherwise a copy would go back to the tower at once.
        with tf.control_dependencies(due):
            returned = {key: cached_copy(tensor) for key, tensor in cached.items()}
        taken = _values_of(section.input_tensors, live | returned)
        backward = functions.backward[number](
            starts[number], taken, upstream, penalty_gradients[number]
        )
        keep(section, backward)
    return TowerResult(
        metrics,
        [total(gradients[id(variable)]) for variable in model.trainable_variables],
        [changed.get(id(variable)) for variable in model.non_trainable_variables],
    )


def _by_id(keys: Iterable[object], values: Iterable[Any]) -> dict[int, Any]:
    """Maps the ids of variables or of a model's tensors to those values not None."""
    return {
        id(key): value
        for key, value in zip(keys, values, strict=True)
        if value is not None
    }


def _values_of(keys: Iterable[object], values: dict[int, tf.Tensor]) -> list[tf.Tensor]:
    return [values[id(key)] for key in keys]
