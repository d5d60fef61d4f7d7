"""Estimates what each call of a model costs, and chooses where to cut."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.sections import memory
from cifar10.sections.cutting import Call, Section, crossing, is_masked
from cifar10.sections.tower import SectionTower

# How much larger than possible the largest section may be where that saves time.
_ROOM = 1.05

_NEVER = 10**18  # Bytes.


class Costs(NamedTuple):
    """The costs of each call of a model."""

    activations: list[int]  # Bytes that it keeps for the gradients.
    multiplications: list[int]  # In its forward pass.


def costs(
    model: keras.Model, tower: SectionTower, calls: Sequence[Call], batch: tuple
) -> Costs:
    """Returns the costs of each call of a model, for shapes of (inputs, labels)."""
    section = Section(calls, model.inputs, model.outputs)

    def compute(start: list, inputs: list, labels: tf.Tensor) -> tuple:
        return tower.last(section, start, inputs, labels, [])

    traced = tf.function(compute, autograph=False).get_concrete_function(
        [tf.TensorSpec(v.shape, v.dtype) for v in section.non_trainable_variables],
        tf.nest.flatten(batch[0]),
        batch[1],
    )
    return Costs(
        memory.kept(traced.graph, traced.outputs, section.ends),
        memory.multiplications(traced.graph, section.ends),
    )


def balanced(
    model: keras.Model,
    calls: Sequence[Call],
    activations: Sequence[int],
    batch_size: int,
    count: int,
) -> list[int]:
    """Chooses where to cut so that the largest section is as small as possible.

    When a section runs backward, its activations are in memory, the gradients of its
    inputs and outputs, and the boundary tensors of all earlier sections. Returned are
    the places of the calls at which sections but the first one begin.
    """
    total = len(calls)
    sums = [0, *itertools.accumulate(activations)]
    between = [_carried(model, calls, n, batch_size) for n in range(1, total)]
    carried = [0, *between, 0]

    def largest(before: tuple[int, list[int]], begin: int, end: int) -> int:
        """Returns the most bytes of the sections so far, with a further one."""
        cached = sum(carried[place] for place in [*before[1], begin])
        section = sums[end] - sums[begin] + carried[begin] + carried[end]
        return max(before[0], cached + section)

    # By the end of the first sections: their most bytes, and where they begin.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for number in range(1, count):
        best = {
            end: min(
                (largest(before, begin, end), [*before[1], begin])
                for begin, before in best.items()
                if begin < end
            )
            for end in range(number, total)
        }
    ends = {begin: largest(before, begin, total) for begin, before in best.items()}
    # The last section is not recomputed, so it may be a little larger.
    bound = _ROOM * min(ends.values())
    last = min(begin for begin, size in ends.items() if size <= bound)
    return [*best[last][1], last][1:]


def _carried(
    model: keras.Model, calls: Sequence[Call], place: int, batch_size: int
) -> int:
    """Returns the bytes of a boundary's tensors; far too many where no cut can be."""
    tensors = crossing(model, calls[:place], calls[place:])
    if any(map(is_masked, tensors)):
        return _NEVER
    return sum(
        memory.size(tf.TensorSpec([batch_size, *tensor.shape[1:]], tensor.dtype))
        for tensor in tensors
    )
