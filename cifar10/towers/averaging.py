"""Averages over towers: of gradients, and of batch statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


class Averages(NamedTuple):
    """What the towers of a step give together.

    Attributes:
        gradients: The mean over the towers, by variable; None where there is none.
        statistics: New values of the non-trainable variables; None leaves one as it is.
        metrics: Scalars by name.
        tower_losses: floating [towers], each tower's total loss.
        activations: The first tower's activations by layer; only with summaries.
        global_batch_size: Images of all towers together.
    """

    gradients: list[Gradient]
    statistics: list[tf.Tensor | None]
    metrics: dict[str, tf.Tensor]
    tower_losses: tf.Tensor
    activations: dict[str, tf.Tensor]
    global_batch_size: int


def average_gradients(
    tower_gradients: Sequence[Sequence[Gradient]], names: Sequence[str]
) -> list[Gradient]:
    """Averages each variable's gradient over all towers.

    With two towers and two variables a and b, whose gradients are

        tower 0: [a0, b0]
        tower 1: [a1, b1]

    the result is [(a0 + a1) / 2, (b0 + b1) / 2]. Every tower's loss is the mean over
    its own batch and all batches are of one size, so this is the gradient of the mean
    over the global batch: the only place where gradients are divided by the number of
    towers.

    Args:
        tower_gradients: `tower_gradients[tower][variable]`. Sparse gradients may be
            `tf.IndexedSlices`.
        names: The variables' names, for messages.

    Returns:
        One gradient per variable; sparse if it is so on every tower; None if it is None
        on every tower.

    Raises:
        ValueError: A variable has a gradient on some towers only.
    """
    averaged: list[Gradient] = []
    for name, gradients in zip(names, zip(*tower_gradients, strict=True), strict=True):
        without = [
            tower for tower, gradient in enumerate(gradients) if gradient is None
        ]
        if len(without) == len(gradients):
            averaged.append(None)
            continue
        if without:
            raise ValueError(
                f"Variable {name} has a gradient on some towers but none on towers "
                f"{without}. All towers must compute the same function."
            )
        averaged.append(_mean(gradients))
    return averaged


def average_statistics(
    tower_statistics: Sequence[Sequence[tf.Tensor | None]],
) -> list[tf.Tensor | None]:
    """Averages the new values of the non-trainable variables over all towers.

    Args:
        tower_statistics: `tower_statistics[tower][variable]`; None where a tower left
            the variable as it is.

    Returns:
        One value per variable: the mean for floating ones, such as batch statistics;
        the first tower's for others, such as counters and the state of random
        generators, which must advance once a step; None for those left as they are.
    """
    return [
        _mean(values)
        if values[0] is not None and values[0].dtype.is_floating
        else values[0]
        for values in zip(*tower_statistics, strict=True)
    ]


def scaled(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> Gradient:
    """Returns a gradient times a factor, sparse if it is."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values * factor, gradient.indices, gradient.dense_shape
        )
    return gradient * factor


def _mean(
    values: Sequence[tf.Tensor | tf.IndexedSlices],
) -> tf.Tensor | tf.IndexedSlices:
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, tf.IndexedSlices) for value in values):
        # The slices of all towers side by side; equal indices add up when applied.
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], axis=0) / len(values),
            tf.concat([value.indices for value in values], axis=0),
            values[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(value) for value in values]) / len(values)
