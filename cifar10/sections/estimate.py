"""Estimates what each call of a model costs, and chooses where to cut."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.sections import memory
from cifar10.sections.cutting import Call, Section, crossing, is_masked
from cifar10.sections.tower import SectionTower

# How much larger than necessary the largest section may be where that saves time.
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

    When a section runs backward, memory holds its activations, the gradients of its
    inputs and outputs, and the boundary tensors of all earlier sections. Returns the
    places of the calls at which sections but the first one begin.
    """
    total = len(calls)
    sums = [0, *itertools.accumulate(activations)]
    between = [_carried(model, calls, n, batch_size) for n in range(1, total)]
    carried = [0, *between, 0]

    # The first sections: bytes of the largest with what waits meanwhile, bytes of what
    # waits between them, and where they begin.
    def extended(before: tuple, begin: int, end: int) -> tuple[int, int, list[int]]:
        most, cached, begins = before
        cached += carried[begin]
        section = sums[end] - sums[begin] + carried[begin] + carried[end]
        return max(most, cached + section), cached, [*begins, begin]

    best: dict[int, list[tuple]] = {0: [(0, 0, [])]}  # By where they end.
    for number in range(1, count):
        longer: dict[int, list[tuple]] = {end: [] for end in range(number, total)}
        for end, chosen in longer.items():
            earlier = [begin for begin in best if begin < end]
            for cut in sorted(extended(b, n, end) for n in earlier for b in best[n]):
                if not chosen or cut[1] < chosen[-1][1]:  # Else worse in both.
                    chosen.append(cut)
        best = longer
    cuts = {n: min(extended(b, n, total) for b in best[n]) for n in best}
    # The last section is not recomputed, so it may be a little larger.
    bound = _ROOM * min(cuts.values())[0]
    return cuts[min(begin for begin in cuts if cuts[begin][0] <= bound)][2][1:]


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
