"""Helpers for the graph of a step: tracing, packed metrics, conditional writes."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.layers import is_max_pooling, pooling_for_xla
from cifar10.models import layer_tree

Traced: TypeAlias = "tf.types.experimental.PolymorphicFunction"


def traced(function: Callable[..., Any], *, xla: bool = False) -> Traced:
    """Wraps a function in a `tf.function` whose traces are counted separately.

    With `xla`, XLA compiles the whole function, whose variables share a device.
    """
    # TensorFlow counts traces per code object, and would warn in the fifth training run
    # of a process, which traces the same code. It counts anew for each `partial`.
    own = functools.partial(function)
    return tf.function(own, autograph=False, jit_compile=xla or None)


def xla_pooling(model: keras.Model, device: str, xla: bool) -> AbstractContextManager:
    """Replaces the gradient of max pooling where XLA compiles it for a GPU."""
    found = layer_tree.layers(model) if xla and "gpu" in device.lower() else ()
    pools = {one: pooling_for_xla(one) for one in found if is_max_pooling(one)}
    return layer_tree.replaced_calls(pools)


def check_scalars(metrics: Mapping[str, tf.Tensor]) -> None:
    """Refuses metrics that cannot be packed by `join_numbers`."""
    for name, value in metrics.items():
        if value.shape.rank != 0:
            raise UsageError(
                f"The metric {name} has the shape {value.shape}. The loss function has "
                "to return scalars, such as means over the batch."
            )


def join_numbers(metrics: Mapping[str, tf.Tensor], losses: tf.Tensor) -> tf.Tensor:
    """Packs all scalar metrics, then the towers' losses, into float64 [numbers].

    Every read waits for the device, so one tensor is read instead of a hundred scalars.
    For several steps, each tensor has a leading dimension of steps.
    """
    rank = losses.shape.rank - 1
    scalars = {name: one for name, one in metrics.items() if one.shape.rank == rank}
    ordered = [scalars[name] for name in _order(scalars)]
    alike = itertools.groupby(ordered, lambda scalar: scalar.dtype)
    parts = [*(tf.stack([*group], axis=-1) for _, group in alike), losses]
    return tf.concat([tf.cast(part, tf.float64) for part in parts], axis=-1)


def split_numbers(
    numbers: np.ndarray, metrics: Mapping[str, tf.Tensor]
) -> tuple[list[dict[str, float]], np.ndarray]:
    """Unpacks `join_numbers`: metrics of each step, and losses, [steps, towers]."""
    rows, names = np.atleast_2d(numbers), _order(metrics)
    of_steps = [dict(zip(names, map(float, row), strict=False)) for row in rows]
    return of_steps, rows[:, len(names) :]


def assign_unless(
    condition: tf.Tensor,
    variables: Sequence[tf.Variable],
    values: Sequence[tf.Tensor],
    *,
    xla: bool = False,
) -> None:
    """Assigns values unless a condition holds, with one operation per device.

    In a function that XLA compiles (`xla`), each value is selected instead.
    """
    if xla:  # It fuses this into the update; at a branch, the host would wait.
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.where(condition, variable.read_value(), value))
        return

    @tf.function(autograph=False)
    def assign(handles: list[tf.Tensor], values: list[tf.Tensor]) -> None:
        for handle, value in zip(handles, values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    @tf.function(autograph=False)
    def do_nothing(handles: list[tf.Tensor], values: list[tf.Tensor]) -> None:
        del handles, values

    # `tf.cond` would add a Switch for each variable and each value (807 of the 3,338
    # operations of `resnet`), and the host would visit each Switch in every step.
    # Variables can be on two devices: int32 on the host, all others on a GPU.
    on_devices: dict[str, tuple[list[tf.Tensor], list[tf.Tensor]]] = {}
    for variable, value in zip(variables, values, strict=True):
        handles, old = on_devices.setdefault(variable.device, ([], []))
        handles.append(variable.handle)
        old.append(value)
    for arguments in on_devices.values():
        tf.raw_ops.If(
            cond=condition,
            input=[one for part in arguments for one in part],
            Tout=[],
            then_branch=do_nothing.get_concrete_function(*arguments),
            else_branch=assign.get_concrete_function(*arguments),
        )


def _order(metrics: Mapping[str, tf.Tensor]) -> list[str]:
    return sorted(metrics, key=lambda name: (metrics[name].dtype.name, name))
