"""Traces functions as graphs, and packs the numbers of a step to read them at once."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def traced(function: Callable[..., Any]) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function as a graph, like `tf.function`; counts its tracings apart.

    TensorFlow counts tracings by the code of a function. So it would warn at the fifth
    training of a process, which traces the same code for the fifth model. It counts a
    `partial` separately, and so warns only if one training traces again and again.
    """
    own = functools.partial(function)
    return tf.function(own, autograph=False)


def join_numbers(
    metrics: Mapping[str, tf.Tensor], tower_losses: tf.Tensor
) -> tf.Tensor:
    """Returns the scalars among `metrics` and then the losses, float64 [numbers].

    Each read of a number waits for the device, which takes longer than copying a
    hundred. The numbers of several steps have a leading dimension of steps.
    """
    rank = tower_losses.shape.rank - 1
    scalars = {name: one for name, one in metrics.items() if one.shape.rank == rank}
    ordered = [scalars[name] for name in _order(scalars)]
    alike = itertools.groupby(ordered, lambda scalar: scalar.dtype)
    parts = [*(tf.stack([*group], axis=-1) for _, group in alike), tower_losses]
    return tf.concat([tf.cast(part, tf.float64) for part in parts], axis=-1)


def split_numbers(
    numbers: np.ndarray, metrics: Mapping[str, tf.Tensor]
) -> tuple[list[dict[str, float]], np.ndarray]:
    """Returns the metrics of each step and the towers' losses, [steps, towers].

    `numbers` are what `join_numbers` has returned, of one step or of several.
    """
    rows, names = np.atleast_2d(numbers), _order(metrics)
    of_steps = [dict(zip(names, map(float, row), strict=False)) for row in rows]
    return of_steps, rows[:, len(names) :]


def _order(metrics: Mapping[str, tf.Tensor]) -> list[str]:
    return sorted(metrics, key=lambda name: (metrics[name].dtype.name, name))
