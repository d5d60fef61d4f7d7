"""Smaller learning rates for some variables: a factor of each one's updates.

The factors are a variable of the optimizer, so that checkpoints hold them and every
replica has the first one's.
"""

from collections.abc import Collection
from typing import Any

import keras
import tensorflow as tf


class _ScaledUpdates:
    """An optimizer whose updates are multiplied, each variable's by its factor.

    The whole update is multiplied, including what momentum and weight decay add, as by
    a smaller learning rate; Keras has one rate for all. A factor of the gradients would
    cancel out in optimizers that divide by their size, such as Adam.
    """

    def build(self: Any, variables: list[keras.Variable]) -> None:
        """Makes the factors, all of them 1."""
        if self.built:
            return
        super().build(variables)  # type: ignore[misc]
        self.factors = self.add_variable(
            [len(variables)], initializer="ones", name="factors"
        )

    def apply(
        self: Any,
        grads: list[tf.Tensor],
        trainable_variables: list[keras.Variable],
    ) -> None:
        """Applies an update, and takes a part of it back."""
        before = [one.value.read_value() for one in trainable_variables]
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        for variable, value in zip(trainable_variables, before, strict=True):
            factor = self.factors.value[self._get_variable_index(variable)]
            change = variable.value - value
            variable.assign(value + tf.cast(factor, value.dtype) * change)


def scaled(kind: type) -> type[keras.optimizers.Optimizer]:
    """Returns the class of optimizers of a kind whose updates have factors."""
    return type(kind.__name__, (_ScaledUpdates, kind), {})


def slow_down(
    optimizer: keras.optimizers.Optimizer,
    variables: Collection[keras.Variable],
    factor: float,
) -> None:
    """Gives a factor to some variables of an optimizer of such a class."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    factors = optimizer.factors.numpy()
    for variable in variables:
        # There is no public way.
        factors[optimizer._get_variable_index(variable)] = factor  # noqa: SLF001
    optimizer.factors.assign(factors)
