"""Stacks the batches of steps that run in one call to TensorFlow."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from cifar10.input.pipeline import TowerBatch


def stacked(batches: Sequence[Sequence[TowerBatch]], most: int) -> list[TowerBatch]:
    """Stacks batches, `[step][tower]`, for a call of up to `most` steps, by tower.

    Repeats the last one, so that images are [most, batch, ...] in calls of any length.
    """
    filled = [*batches, *[batches[-1]] * (most - len(batches))]
    of_towers = zip(*filled, strict=True)
    return [tuple(map(tf.stack, zip(*of_tower, strict=True))) for of_tower in of_towers]


def in_calls(
    batches: Iterable[Sequence[TowerBatch]], counts: Iterable[int], most: int
) -> Iterator[list[TowerBatch]]:
    """Yields the `stacked` batches of each call of `counts` steps."""
    steps = iter(batches)
    for count in counts:
        with tf.device("/cpu:0"):  # Not around `yield`: scopes end in their order.
            made = stacked([*itertools.islice(steps, count)], most)
        yield made
