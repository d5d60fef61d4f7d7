"""A full cycle: all sections of a tower forward, then all of them backward.

It decides what runs when; it computes nothing itself. A boundary tensor is in memory
until the last function that takes it has run, as any tensor of a graph.
"""

import collections
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.tower import Backward, SectionFunctions
from cifar10.towers.towers import Batch, TowerResult, total
from cifar10.towers.update import Gradient


def run_cycle(
    model: keras.Model,
    functions: SectionFunctions,
    values: Iterable[tf.Tensor],
    batch: Batch,
) -> TowerResult:
    """Computes one batch, section by section.

    The `functions` compute the sections of `model`, whose non-trainable variables have
    these `values` at the start.
    """
    *earlier, last = functions.sections
    inputs, labels = batch
    start = _by_id(model.non_trainable_variables, values)
    changed: dict[int, tf.Tensor] = {}
    starts: list[list[tf.Tensor]] = []
    penalties: list[list[tf.Tensor]] = []
    # A subclassed model may declare no inputs.
    declared = model.inputs if earlier else last.input_tensors
    live = _by_id(declared, tf.nest.flatten(inputs))
    cached = dict(live)
    for section, forward in zip(earlier, functions.forward, strict=True):
        variables = section.non_trainable_variables
        starts.append(_values_of(variables, start | changed))
        computed = forward(starts[-1], _values_of(section.input_tensors, live))
        live |= _by_id(section.output_tensors, computed.outputs)
        cached |= _by_id(section.output_tensors, computed.cached)
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
        backward = functions.backward[number](
            starts[number],
            _values_of(section.input_tensors, cached),
            [gradients[id(tensor)] for tensor in section.output_tensors],
            penalty_gradients[number],
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
