"""The functions that compute the sections of all towers, one after another.

Each section has functions of its own: within a single one TensorFlow would decide what
runs when, and might merge both forward passes into one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.sections.tower import Backward, Forward, SectionTower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient

# Makes of a `tf.function` what is called in its place.
Wrap: TypeAlias = "Callable[[Any], Any]"


class Functions(NamedTuple):
    """The functions of a cycle. Their arguments and results are lists over the towers.

    Attributes:
        forward: `SectionTower.forward` of each section but the last; it also returns
            the outputs as they are in the cache.
        last: `SectionTower.last` of the last section, without the model's output.
        backward: `SectionTower.backward` of each section but the last.
    """

    forward: list[Any]
    last: Any
    backward: list[Any]


class SectionFunctions:
    """Builds the functions.

    Args:
        state: The variables that they read.
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

    def build(self, sections: Sequence[Section], wrap: Wrap) -> Functions:
        """Builds the functions of a model's sections, in their order.

        Args:
            sections: The sections.
            wrap: As for `SectionedBuilder`.
        """
        *earlier, last = sections
        return Functions(
            [wrap(_function(self._forward, section)) for section in earlier],
            wrap(_function(self._last, last)),
            [wrap(_function(self._backward, section)) for section in earlier],
        )

    def _forward(
        self,
        section: Section,
        starts: list[list[tf.Tensor]],
        inputs: list[list[tf.Tensor]],
    ) -> list[tuple[Forward, list[tf.Tensor]]]:
        outputs = []
        for number, device in enumerate(self._devices):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                computed = self._tower.forward(section, starts[number], inputs[number])
            cached = computed.outputs
            if self._cache_device:
                with tf.device(self._cache_device):
                    cached = [tf.identity(tensor) for tensor in cached]
            outputs.append((computed, cached))
        return outputs

    def _last(
        self,
        section: Section,
        starts: list[list[tf.Tensor]],
        inputs: list[list[tf.Tensor]],
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
                    inputs[number],
                    labels[number],
                    penalties[number],
                )
            outputs.append((metrics, computed._replace(outputs=[]), *gradients))
        return outputs

    def _backward(
        self,
        section: Section,
        starts: list[list[tf.Tensor]],
        inputs: list[list[tf.Tensor]],
        upstream: list[list[list[Gradient]]],
        penalty_gradients: list[list[Gradient]],
    ) -> list[Backward]:
        outputs = []
        for number, device in enumerate(self._devices):
            with tf.device(device), tf.name_scope(f"tower_{number}"):
                outputs.append(
                    self._tower.backward(
                        section,
                        starts[number],
                        inputs[number],
                        upstream[number],
                        penalty_gradients[number],
                    )
                )
        return outputs


def _function(compute: Callable, section: Section) -> Any:
    return tf.function(
        functools.partial(compute, section),
        autograph=False,
        # Else the operations would be inlined into the step that calls the function.
        experimental_attributes={"_noinline": True},
    )
