"""Optimizers that Keras lacks."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

# All constants are from airbench94_muon.py. First the coefficients of the quintic
# iteration, chosen for the steepest slope at zero, and the number of iterations.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3
# Initial learning rates of biases and of the last matrix, for a loss summed over
# `_REFERENCE_BATCH` images (ours is a mean). Then momentum and weight decay.
_BIAS_RATE = 0.053
_HEAD_RATE = 0.67
_OTHER_MOMENTUM = 0.85
_DECAY = 0.004
_REFERENCE_BATCH = 2000


class ScaledUpdates:
    """Mixin that makes an optimizer multiply each variable's updates by a factor.

    A factor acts like a learning rate for one variable. Scaling the gradients instead
    would have no effect in Adam, which divides by the gradients' size. A variable of
    the optimizer stores the factors, so checkpoints and replicas include them.
    """

    def build(self: Any, variables: list[keras.Variable]) -> None:
        """Creates the optimizer's variables, with all factors set to 1."""
        super().build(variables)  # type: ignore[misc]
        shape = [len(variables)]
        self.factors = self.add_variable(shape, initializer="ones", name="factors")
        self.indices = _indices(variables)

    def apply(
        self: Any, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> None:
        """Applies an update, then multiplies each variable's change by its factor."""
        before = [one.value.read_value() for one in trainable_variables]
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        for variable, value in zip(trainable_variables, before, strict=True):
            factor = self.factors.value[self.indices[variable.value.ref()]]
            change = variable.value - value
            variable.assign(value + tf.cast(factor, value.dtype) * change)


class Muon(keras.optimizers.Optimizer):
    """Muon for filters and Nesterov SGD for all other variables, as in airbench.

    Each update orthogonalizes the momentum of the filters and rescales the filters to
    the norm sqrt(outputs). `keras.optimizers.Muon` is no substitute: it updates filters
    with Adam, like all variables that do not have two dimensions.

    Args:
        learning_rate: Highest rate of the filters. The rates of all other variables
            rise and fall in proportion to the filters' current rate.
        momentum: Nesterov momentum of the filters.
        trained_parts: `Architecture.trained_parts`. A variable with a fraction is
            trained only while the filters' rate is above (1 - fraction) times the
            highest rate, and thus not at the beginning of a warm-up or of `one_cycle`.
    """

    def __init__(
        self,
        learning_rate: float,
        momentum: float,
        trained_parts: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name="muon")
        self.highest_rate = learning_rate
        self.momentum = momentum
        self._trained_parts = tuple((trained_parts or {}).items())

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates a momentum variable for each variable."""
        super().build(variables)
        self.momentums = self.add_optimizer_variables(variables, "momentum")
        parts = dict(self._trained_parts)
        self._parts = [parts.get(variable.path) for variable in variables]
        self._indices = _indices(variables)

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Updates one variable and its momentum."""
        index = self._indices[variable.ref()]
        momentum = self.momentums[index]
        values = tf.convert_to_tensor(variable)
        rate = tf.cast(learning_rate, variable.dtype)
        if len(variable.shape) == 4:
            outputs = variable.shape[-1]
            momentum.assign(self.momentum * momentum.value + gradient)
            direction = gradient + self.momentum * momentum.value
            update = orthogonalized(tf.reshape(direction, [-1, outputs]))
            update = tf.reshape(update, variable.shape)
            scale = outputs**0.5 / tf.norm(values)  # Infinite for zero filters.
            variable.assign(tf.math.multiply_no_nan(scale, values) - rate * update)
            return
        remaining = rate / (self.highest_rate or 1.0)
        if part := self._parts[index]:
            remaining = tf.maximum(1.0 - (1.0 - remaining) / part, 0.0)
        initial = _HEAD_RATE if len(variable.shape) == 2 else _BIAS_RATE
        summed = gradient * _REFERENCE_BATCH + (_DECAY / initial) * values
        momentum.assign(_OTHER_MOMENTUM * momentum.value + summed)
        direction = summed + _OTHER_MOMENTUM * momentum.value
        variable.assign(values - remaining * initial * direction)


def _indices(variables: list[keras.Variable]) -> dict[Any, int]:
    return {variable.value.ref(): index for index, variable in enumerate(variables)}


def orthogonalized(matrix: tf.Tensor) -> tf.Tensor:
    """Approximately orthogonalizes a matrix."""
    # A quintic Newton-Schulz iteration keeps the singular vectors and moves singular
    # values to roughly 0.5 to 1.5. The smallest values can remain lower.
    rows, columns = matrix.shape
    wide = tf.transpose(matrix) if rows > columns else matrix
    wide /= tf.norm(wide) + 1e-7
    first, third, fifth = _QUINTIC
    for _ in range(_ITERATIONS):
        product = tf.matmul(wide, wide, transpose_b=True)
        weights = third * product + fifth * tf.matmul(product, product)
        wide = first * wide + tf.matmul(weights, wide)
    return tf.transpose(wide) if rows > columns else wide
