"""A full cycle: all sections forward, then all of them backward.

It decides what runs when and what is kept until when; it computes nothing itself. Lists
have an element for each tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.functions import Functions
from cifar10.sections.tower import Backward, Forward
from cifar10.towers.update import Gradient


class CycleResult(NamedTuple):
    """What a tower computes from one batch.

    Attributes:
        metrics: Scalars by name, among them `total_loss`.
        gradients: `gradients[variable]`, one from each section that uses the variable.
        statistics: As in `TowerResult`.
    """

    metrics: dict[str, tf.Tensor]
    gradients: list[list[Gradient]]
    statistics: list[tf.Tensor | None]


class Parts(NamedTuple):
    """A model cut into sections.

    Attributes:
        sections: The sections, in their order.
        inputs: The model's inputs as they occur in `section.input_tensors`.
        trainable: The model's trainable variables.
        non_trainable: Its other variables.
    """

    sections: tuple[Section, ...]
    inputs: tuple[object, ...]
    trainable: tuple[keras.Variable, ...]
    non_trainable: tuple[keras.Variable, ...]


def parts_of(model: keras.Model, sections: Sequence[Section]) -> Parts:
    """Returns the parts of a model that is cut into some sections."""
    return Parts(
        tuple(sections),
        # A subclassed model may declare no inputs.
        tuple(model.inputs if len(sections) > 1 else sections[0].input_tensors),
        tuple(model.trainable_variables),
        tuple(model.non_trainable_variables),
    )


class Cycle:
    """One cycle of all towers, each with one batch.

    Args:
        parts: The sections and what they have in common.
        functions: The functions that compute the sections.
        values: `values[tower][variable]`, of the non-trainable variables.
        batches: One (inputs, labels) for each tower.
    """

    def __init__(
        self,
        parts: Parts,
        functions: Functions,
        values: Sequence[Sequence[tf.Tensor]],
        batches: Sequence[tuple[tf.Tensor, tf.Tensor]],
    ) -> None:
        self._parts = parts
        self._sections = parts.sections
        self._functions = functions
        self._towers = range(len(batches))
        self._labels = [labels for _, labels in batches]
        self._values = [
            dict(zip(map(id, parts.non_trainable), tower_values, strict=True))
            for tower_values in values
        ]
        self._changed: list[set[int]] = [set() for _ in self._towers]
        # By section: the values that its non-trainable variables had before it ran.
        self._starts: list[list[list[tf.Tensor]]] = []
        self._penalties: list[list[list[tf.Tensor]]] = [[] for _ in self._towers]
        inputs = [tf.nest.flatten(batch_inputs) for batch_inputs, _ in batches]
        # `[id of a tensor][tower]`. The outputs of a section are live, where they were
        # computed, until the last section that uses them has run forward; and cached,
        # maybe on another device, until the first one that uses them has run backward.
        self._live = {
            id(tensor): [tower_inputs[place] for tower_inputs in inputs]
            for place, tensor in enumerate(parts.inputs)
        }
        self._cache = dict(self._live)
        self._inputs = frozenset(self._live)
        # `[tower][id]`: gradients, one from each section that uses the tensor.
        self._upstream: list[dict[int, list[Gradient]]] = [{} for _ in self._towers]
        self._gradients: list[dict[int, list[Gradient]]] = [{} for _ in self._towers]

    def run(self) -> list[CycleResult]:
        """Runs the cycle, once."""
        *earlier, _ = self._sections
        for number, section in enumerate(earlier):
            self._run_forward(number, section)
        metrics, penalty_gradients = self._run_last()
        for number in reversed(range(len(earlier))):
            gradients = [by_section[number] for by_section in penalty_gradients]
            self._run_backward(number, earlier[number], gradients)
        return [
            CycleResult(
                metrics[tower],
                [
                    self._gradients[tower].get(id(variable), [])
                    for variable in self._parts.trainable
                ],
                [
                    self._values[tower][id(variable)]
                    if id(variable) in self._changed[tower]
                    else None
                    for variable in self._parts.non_trainable
                ],
            )
            for tower in self._towers
        ]

    def _run_forward(self, number: int, section: Section) -> None:
        start = self._start(section)
        outputs = self._functions.forward[number](start, _of(self._live, section))
        for place, tensor in enumerate(section.output_tensors):
            self._live[id(tensor)] = [
                computed.outputs[place] for computed, _ in outputs
            ]
            self._cache[id(tensor)] = [cached[place] for _, cached in outputs]
        for tower, (computed, _) in enumerate(outputs):
            self._keep_statistics(tower, section, computed)
            self._penalties[tower].append(computed.penalties)
        later = self._sections[number + 1 :]
        self._live = _needed(self._live, later)

    def _run_last(self) -> tuple[list[dict], list[list[list[Gradient]]]]:
        section = self._sections[-1]
        start = self._start(section)
        inputs = _of(self._live, section)
        self._live.clear()
        metrics, penalty_gradients = [], []
        outputs = self._functions.last(start, inputs, self._labels, self._penalties)
        for tower, (values, computed, backward, gradients) in enumerate(outputs):
            metrics.append(values)
            penalty_gradients.append(gradients)
            self._keep_statistics(tower, section, computed)
            self._keep_gradients(tower, section, backward)
        return metrics, penalty_gradients

    def _run_backward(
        self, number: int, section: Section, penalty_gradients: list[list[Gradient]]
    ) -> None:
        self._cache = _needed(self._cache, self._sections[: number + 1])
        upstream = [
            [gradients.pop(id(tensor), []) for tensor in section.output_tensors]
            for gradients in self._upstream
        ]
        outputs = self._functions.backward[number](
            self._starts[number], _of(self._cache, section), upstream, penalty_gradients
        )
        for tower, backward in enumerate(outputs):
            self._keep_gradients(tower, section, backward)

    def _start(self, section: Section) -> list[list[tf.Tensor]]:
        start = [
            [values[id(variable)] for variable in section.non_trainable_variables]
            for values in self._values
        ]
        self._starts.append(start)
        return start

    def _keep_statistics(self, tower: int, section: Section, computed: Forward) -> None:
        """Keeps the new values of a section's non-trainable variables."""
        for variable, value in zip(
            section.non_trainable_variables, computed.statistics, strict=True
        ):
            if value is not None:
                self._values[tower][id(variable)] = value
                self._changed[tower].add(id(variable))

    def _keep_gradients(self, tower: int, section: Section, backward: Backward) -> None:
        """Keeps a section's gradients, for the update and for earlier sections."""
        for variable, gradient in zip(
            section.trainable_variables, backward.variables, strict=True
        ):
            self._gradients[tower].setdefault(id(variable), []).append(gradient)
        for tensor, gradient in zip(
            section.input_tensors, backward.inputs, strict=True
        ):
            if id(tensor) not in self._inputs and gradient is not None:
                self._upstream[tower].setdefault(id(tensor), []).append(gradient)


def _of(tensors: dict[int, list[tf.Tensor]], section: Section) -> list[list[tf.Tensor]]:
    """Returns the inputs of a section, for each tower."""
    inputs = [tensors[id(tensor)] for tensor in section.input_tensors]
    return [list(tower_inputs) for tower_inputs in zip(*inputs, strict=True)]


def _needed(
    tensors: dict[int, list[tf.Tensor]], sections: Sequence[Section]
) -> dict[int, list[tf.Tensor]]:
    """Returns only the tensors that some of these sections use."""
    needed = {id(tensor) for section in sections for tensor in section.input_tensors}
    return {key: values for key, values in tensors.items() if key in needed}
