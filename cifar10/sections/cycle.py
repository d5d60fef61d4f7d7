"""A full cycle: all sections forward, then all of them backward.

It decides what runs when and what is kept until when; it computes nothing itself. What
belongs to a tower is in lists with one element for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.functions import Functions
from cifar10.sections.tower import Backward, Forward
from cifar10.towers.averaging import Gradient


class CycleResult(NamedTuple):
    """What a tower computes from one batch.

    Attributes:
        metrics: Scalars by name, among them `total_loss`.
        gradients: By variable, from each section that uses it.
        statistics: As in `TowerResult`.
    """

    metrics: dict[str, tf.Tensor]
    gradients: list[list[Gradient]]
    statistics: list[tf.Tensor | None]


class Parts(NamedTuple):
    """What a cycle has to know of a model.

    Attributes:
        sections: Its sections, in their order.
        inputs: What stands for its inputs in `section.takes`.
        trainable: Its trainable variables.
        non_trainable: Its other variables.
    """

    sections: tuple[Section, ...]
    inputs: tuple[object, ...]
    trainable: tuple[keras.Variable, ...]
    non_trainable: tuple[keras.Variable, ...]


def parts_of(model: keras.Model, sections: Sequence[Section]) -> Parts:
    """Collects what a cycle has to know of a model.

    Args:
        model: The model.
        sections: Its sections, in their order.
    """
    return Parts(
        tuple(sections),
        # A class of its own may declare no inputs.
        tuple(model.inputs if len(sections) > 1 else sections[0].takes),
        tuple(model.trainable_variables),
        tuple(model.non_trainable_variables),
    )


class Cycle:
    """One cycle of all towers, each with one batch.

    Args:
        parts: The sections and what they have in common.
        functions: What computes them.
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
            dict(zip(map(id, parts.non_trainable), of_tower, strict=True))
            for of_tower in values
        ]
        self._changed: list[set[int]] = [set() for _ in self._towers]
        # By section: the values that its non-trainable variables had before it ran.
        self._starts: list[list[list[tf.Tensor]]] = []
        self._penalties: list[list[list[tf.Tensor]]] = [[] for _ in self._towers]
        inputs = [tf.nest.flatten(one) for one, _ in batches]
        # `[id of a tensor][tower]`. What a section gives is near, where it was made,
        # until the last section that takes it has run forward; and in the cache, which
        # may be elsewhere, until the first one that takes it has run backward.
        self._near = {
            id(tensor): [of_tower[place] for of_tower in inputs]
            for place, tensor in enumerate(parts.inputs)
        }
        self._cache = dict(self._near)
        self._inputs = frozenset(self._near)
        # `[tower][id]`: gradients, from each section that takes or uses it.
        self._upstream: list[dict[int, list[Gradient]]] = [{} for _ in self._towers]
        self._gradients: list[dict[int, list[Gradient]]] = [{} for _ in self._towers]

    def run(self) -> list[CycleResult]:
        """Runs the cycle, once."""
        *earlier, _ = self._sections
        for number, section in enumerate(earlier):
            self._run_forward(number, section)
        metrics, of_penalties = self._run_last()
        for number in reversed(range(len(earlier))):
            own = [of_sections[number] for of_sections in of_penalties]
            self._run_backward(number, earlier[number], own)
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
        outputs = self._functions.forward[number](start, _of(self._near, section))
        for place, tensor in enumerate(section.gives):
            self._near[id(tensor)] = [one.given[place] for one, _ in outputs]
            self._cache[id(tensor)] = [cached[place] for _, cached in outputs]
        for tower, (computed, _) in enumerate(outputs):
            self._move_on(tower, section, computed)
            self._penalties[tower].append(computed.penalties)
        later = self._sections[number + 1 :]
        self._near = _needed(self._near, later)

    def _run_last(self) -> tuple[list[dict], list[list[list[Gradient]]]]:
        section = self._sections[-1]
        start = self._start(section)
        taken = _of(self._near, section)
        self._near.clear()
        metrics, of_penalties = [], []
        outputs = self._functions.last(start, taken, self._labels, self._penalties)
        for tower, (own, computed, backward, through) in enumerate(outputs):
            metrics.append(own)
            of_penalties.append(through)
            self._move_on(tower, section, computed)
            self._move_back(tower, section, backward)
        return metrics, of_penalties

    def _run_backward(
        self, number: int, section: Section, of_penalties: list[list[Gradient]]
    ) -> None:
        self._cache = _needed(self._cache, self._sections[: number + 1])
        upstream = [
            [of_tower.pop(id(tensor), []) for tensor in section.gives]
            for of_tower in self._upstream
        ]
        outputs = self._functions.backward[number](
            self._starts[number], _of(self._cache, section), upstream, of_penalties
        )
        for tower, backward in enumerate(outputs):
            self._move_back(tower, section, backward)

    def _start(self, section: Section) -> list[list[tf.Tensor]]:
        start = [
            [values[id(variable)] for variable in section.non_trainable_variables]
            for values in self._values
        ]
        self._starts.append(start)
        return start

    def _move_on(self, tower: int, section: Section, computed: Forward) -> None:
        """Takes over the new values of a section's non-trainable variables."""
        for variable, value in zip(
            section.non_trainable_variables, computed.statistics, strict=True
        ):
            if value is not None:
                self._values[tower][id(variable)] = value
                self._changed[tower].add(id(variable))

    def _move_back(self, tower: int, section: Section, backward: Backward) -> None:
        """Collects a section's gradients, for the update and for earlier sections."""
        for variable, gradient in zip(
            section.trainable_variables, backward.variables, strict=True
        ):
            self._gradients[tower].setdefault(id(variable), []).append(gradient)
        for tensor, gradient in zip(section.takes, backward.taken, strict=True):
            if id(tensor) not in self._inputs and gradient is not None:
                self._upstream[tower].setdefault(id(tensor), []).append(gradient)


def _of(tensors: dict[int, list[tf.Tensor]], section: Section) -> list[list[tf.Tensor]]:
    """Returns the tensors that a section takes, for each tower."""
    taken = [tensors[id(tensor)] for tensor in section.takes]
    return [list(of_tower) for of_tower in zip(*taken, strict=True)]


def _needed(
    tensors: dict[int, list[tf.Tensor]], sections: Sequence[Section]
) -> dict[int, list[tf.Tensor]]:
    """Leaves out the tensors that none of some sections takes."""
    needed = {id(tensor) for section in sections for tensor in section.takes}
    return {key: values for key, values in tensors.items() if key in needed}
