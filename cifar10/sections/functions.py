"""The functions that compute the sections of all towers, one after another.

Each section has functions of its own: within a single one TensorFlow would decide what
runs when, and might merge both forward passes into one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.tower import Backward, Forward, SectionTower
from cifar10.towers.averaging import Gradient
from cifar10.towers.train_state import TrainState


class Functions(NamedTuple):
    """What computes the sections. Arguments and results are lists, one a tower.

    Attributes:
        forward: For each section but the last: from the starting values of its
            non-trainable variables and the tensors it takes, what `SectionTower`
            returns, and the tensors it gives once more, in the cache.
        last: From the same of the last section, the labels and all penalties, what
            `SectionTower` returns, without the model's output.
        backward: For each section but the last: from the same and the gradients with
            respect to what it gives and its penalties, its own.
    """

    forward: list[Any]
    last: Any
    backward: list[Any]

    def wrapped(self, wrap: Callable[[Any], Any]) -> Functions:
        """Returns what `wrap` makes of each, as `TowerBuilder.wrapped` says."""
        return Functions(
            [wrap(one) for one in self.forward],
            wrap(self.last),
            [wrap(one) for one in self.backward],
        )


class SectionFunctions:
    """Builds the functions.

    Args:
        state: What they read.
        devices: One device name per tower.
        tower: What each tower computes of a section.
        cache_device: Where boundary tensors wait; None: where they are computed.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        tower: SectionTower,
        cache_device: str | None = None,
    ) -> None:
        self._state = state
        self._devices = tuple(devices)
        self._tower = tower
        self._cache_device = cache_device

    def build(self, sections: Sequence[Section]) -> Functions:
        """Builds the functions of a model's sections, in their order."""
        *earlier, last = sections
        return Functions(
            [_function(self._forward, section) for section in earlier],
            _function(self._last, last),
            [_function(self._backward, section) for section in earlier],
        )

    def _forward(
        self,
        section: Section,
        starts: list[list[tf.Tensor]],
        taken: list[list[tf.Tensor]],
    ) -> list[tuple[Forward, list[tf.Tensor]]]:
        outputs = []
        for number, device in enumerate(self._devices):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                computed = self._tower.forward(section, starts[number], taken[number])
            cached = computed.given
            if self._cache_device:
                with tf.device(self._cache_device):
                    cached = [tf.identity(tensor) for tensor in cached]
            outputs.append((computed, cached))
        return outputs

    def _last(
        self,
        section: Section,
        starts: list[list[tf.Tensor]],
        taken: list[list[tf.Tensor]],
        labels: list[tf.Tensor],
        penalties: list[list[list[tf.Tensor]]],
    ) -> list[tuple]:
        outputs = []
        for number, device in enumerate(self._devices):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                metrics, computed, *gradients = self._tower.last(
                    self._state,
                    section,
                    starts[number],
                    taken[number],
                    labels[number],
                    penalties[number],
                )
            outputs.append((metrics, computed._replace(given=[]), *gradients))
        return outputs

    def _backward(
        self,
        section: Section,
        starts: list[list[tf.Tensor]],
        taken: list[list[tf.Tensor]],
        upstream: list[list[list[Gradient]]],
        of_penalties: list[list[Gradient]],
    ) -> list[Backward]:
        outputs = []
        for number, device in enumerate(self._devices):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                outputs.append(
                    self._tower.backward(
                        section,
                        starts[number],
                        taken[number],
                        upstream[number],
                        of_penalties[number],
                    )
                )
        return outputs


def _function(compute: Callable, section: Section) -> Any:
    return tf.function(
        functools.partial(compute, section),
        autograph=False,
        # Otherwise the step that calls it would take its operations for its own.
        experimental_attributes={"_noinline": True},
    )
