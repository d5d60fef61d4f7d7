"""Optimizers of `keras.optimizers`, by name and with arguments.

Weight decay is Keras's: each update first takes `weight_decay` times the learning rate
off the variables (https://arxiv.org/abs/1711.05101). As is usual, biases, and scales
and offsets of normalization, are left out; Keras alone would let them decay too.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from cifar10.config.optimizer_flag import WITHHELD
from cifar10.errors import UsageError

# Filters and matrices have more; biases, scales and offsets are vectors.
_LEAST_DIMENSIONS_TO_DECAY = 2


def find(name: str) -> type[keras.optimizers.Optimizer]:
    """Returns the class with a name, in small letters, of `config.optimizer_flag`."""
    classes = {known.lower(): kind for known, kind in vars(keras.optimizers).items()}
    return classes[name]


def build(
    kind: type[keras.optimizers.Optimizer],
    learning_rate: float,
    momentum: float,
    arguments: Mapping[str, Any],
    variables: Sequence[keras.Variable],
) -> keras.optimizers.Optimizer:
    """Builds an optimizer; it has not seen its variables yet.

    Args:
        kind: A class of Keras, or one with the same arguments.
        learning_rate: Rate until another one is assigned.
        momentum: Passed on to a class that takes one.
        arguments: Arguments of the class by name.
        variables: What it is going to update. Vectors and scalars do not decay.

    Raises:
        UsageError: The class has no such argument, or refuses its value.
    """
    parameters = inspect.signature(kind).parameters
    for name, value in arguments.items():
        _check(kind, name, value, parameters)
    if "momentum" in parameters:
        arguments = {"momentum": momentum, **arguments}
    try:
        optimizer = kind(learning_rate, **arguments)
    except ValueError as error:
        raise UsageError(
            f"optimizer_arguments of the recipe: {kind.__name__} refuses them.\n{error}"
        ) from error
    optimizer.exclude_from_weight_decay(
        [v for v in variables if len(v.shape) < _LEAST_DIMENSIONS_TO_DECAY]
    )
    return optimizer


def _check(
    kind: type,
    name: str,
    value: Any,
    parameters: Mapping[str, inspect.Parameter],
) -> None:
    what = f"optimizer_arguments of the recipe: {name} = {value!a}"
    known = {
        parameter.name: parameter.default
        for parameter in parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
        and parameter.name not in WITHHELD
    }
    if name not in known:
        raise UsageError(
            f"{what}: {kind.__name__} has no such argument. It has {', '.join(known)}."
        )
    is_switch = isinstance(known[name], bool)
    if isinstance(value, bool) != is_switch:
        raise UsageError(
            f"{what}: it is {'true or false' if is_switch else 'a number'}."
        )
