"""Estimates what each call of a model costs, and chooses where to cut."""

import itertools
from collections.abc import Iterable, Sequence
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

    def extended(before: _Cut, begin: int, end: int) -> _Cut:
        """Returns the sections so far with a further one."""
        cached = before.cached + carried[begin]
        section = sums[end] - sums[begin] + carried[begin] + carried[end]
        most = max(before.most, cached + section)
        return _Cut(most, cached, [*before.begins, begin])

    # By the end of the first sections.
    best: dict[int, list[_Cut]] = {0: [_Cut(0, 0, [])]}
    for number in range(1, count):
        best = {
            end: _worth_extending(
                extended(before, begin, end)
                for begin, several in best.items()
                if begin < end
                for before in several
            )
            for end in range(number, total)
        }
    cuts = {
        begin: min(extended(before, begin, total) for before in several)
        for begin, several in best.items()
    }
    # The last section is not recomputed, so it may be a little larger.
    bound = _ROOM * min(cuts.values()).most
    last = min(begin for begin, cut in cuts.items() if cut.most <= bound)
    return cuts[last].begins[1:]


class _Cut(NamedTuple):
    """The first sections of a model, in bytes."""

    most: int  # Of the largest section, with what waits meanwhile.
    cached: int  # What waits between them.
    begins: list[int]  # The places where they begin.


def _worth_extending(cuts: Iterable[_Cut]) -> list[_Cut]:
    """Returns the cuts than which no other has less of both kinds of bytes."""
    chosen: list[_Cut] = []
    for cut in sorted(cuts):
        if not chosen or cut.cached < chosen[-1].cached:
            chosen.append(cut)
    return chosen


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
