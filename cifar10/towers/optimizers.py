"""The optimizers that a recipe may name."""

from __future__ import annotations

import keras
import tensorflow as tf

CHOICES = ("sgd", "muon")

# Of airbench94_muon.py, as are the ratios below: coefficients of the quintic iteration,
# chosen for the steepest slope at zero, and how often it runs.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3

# airbench sums the loss over a batch of 2,000 images; ours is the mean.
_REFERENCE_BATCH = 2000


def build(
    name: str, learning_rate: float, momentum: float, *, scale_loss: bool = False
) -> keras.optimizers.Optimizer:
    """Builds an optimizer.

    Args:
        name: One of `CHOICES`.
        learning_rate: Learning rate of the first update.
        momentum: Momentum of the gradient descent; for `muon`, that of the filters.
        scale_loss: Whether to scale the loss, by a factor that adapts, and to pass over
            updates that overflow: what float16 needs.
    """
    optimizer: keras.optimizers.Optimizer
    if name == "muon":
        optimizer = Muon(learning_rate, momentum)
    else:
        optimizer = keras.optimizers.SGD(learning_rate, momentum)
    return keras.optimizers.LossScaleOptimizer(optimizer) if scale_loss else optimizer


class Muon(keras.optimizers.Optimizer):
    """Muon for filters, Nesterov SGD for everything else, as airbench trains.

    The update of a filter is its momentum made orthogonal, and the filter is kept at
    the norm sqrt(outputs). `keras.optimizers.Muon` does not serve: it takes variables
    of other than two dimensions, and with them all filters, to Adam.

    Args:
        learning_rate: Rate of the filters at the first update; the others keep their
            ratio to it. It is assigned before each update and falls to zero.
        momentum: Nesterov momentum of the filters.
        bias_rate: Rate of the biases at the first update, for the summed loss of 2,000
            images.
        head_rate: Rate of the last matrix, likewise.
        other_momentum: Nesterov momentum of both.
        decay: Weight decay of both, per update.
        whitening_part: Part of the training in which the bias of the first, whitening,
            convolution is trained; its rate falls to zero there.
        name: Name of the optimizer.
    """

    def __init__(
        self,
        learning_rate: float = 0.24,
        momentum: float = 0.6,
        *,
        bias_rate: float = 0.053,
        head_rate: float = 0.67,
        other_momentum: float = 0.85,
        decay: float = 0.004,
        whitening_part: float = 3 / 8,
        name: str = "muon",
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.initial_rate = learning_rate
        self.momentum = momentum
        self.bias_rate = bias_rate
        self.head_rate = head_rate
        self.other_momentum = other_momentum
        self.decay = decay
        self.whitening_part = whitening_part

    def build(self, variables: list[keras.Variable]) -> None:
        """Makes one momentum for each variable."""
        if self.built:
            return
        super().build(variables)
        self.momentums = [
            self.add_variable_from_reference(variable, name="momentum")
            for variable in variables
        ]
        self._whitening = ["whitening" in variable.path for variable in variables]

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Updates one variable and its momentum."""
        index = self._get_variable_index(variable)
        rate = tf.cast(learning_rate, variable.dtype)
        if len(variable.shape) == 4:
            self._update_filter(gradient, variable, self.momentums[index], rate)
            return
        remaining = rate / self.initial_rate
        if self._whitening[index]:
            remaining = tf.maximum(1.0 - (1.0 - remaining) / self.whitening_part, 0.0)
        self._update_other(gradient, variable, self.momentums[index], remaining)

    def _update_filter(
        self,
        gradient: tf.Tensor,
        variable: tf.Variable,
        momentum: keras.Variable,
        rate: tf.Tensor,
    ) -> None:
        outputs = variable.shape[-1]
        momentum.assign(self.momentum * momentum.value + gradient)
        direction = tf.reshape(gradient + self.momentum * momentum.value, [-1, outputs])
        update = tf.reshape(orthogonalized(direction), variable.shape)
        values = tf.convert_to_tensor(variable)
        variable.assign(values * (outputs**0.5 / tf.norm(values)) - rate * update)

    def _update_other(
        self,
        gradient: tf.Tensor,
        variable: tf.Variable,
        momentum: keras.Variable,
        remaining: tf.Tensor,
    ) -> None:
        """Updates a bias or a matrix; `remaining` is the part left of its rate."""
        initial = self.head_rate if len(variable.shape) == 2 else self.bias_rate
        summed = gradient * _REFERENCE_BATCH
        summed += (self.decay / initial) * tf.convert_to_tensor(variable)
        momentum.assign(self.other_momentum * momentum.value + summed)
        direction = summed + self.other_momentum * momentum.value
        variable.assign_sub(remaining * initial * direction)

    def get_config(self) -> dict:
        """Returns the constructor's arguments, as Keras asks of an optimizer."""
        return {
            "learning_rate": self.initial_rate,
            "momentum": self.momentum,
            "bias_rate": self.bias_rate,
            "head_rate": self.head_rate,
            "other_momentum": self.other_momentum,
            "decay": self.decay,
            "whitening_part": self.whitening_part,
            "name": self.name,
        }


def orthogonalized(matrix: tf.Tensor) -> tf.Tensor:
    """Brings the singular values of a matrix near 1, by a few matrix products.

    An iteration after Newton and Schulz with a quintic polynomial: the singular vectors
    stay, the singular values end between about 0.5 and 1.5, the smallest ones below.

    Args:
        matrix: floating [rows, columns].

    Returns:
        A matrix of the same type and shape.
    """
    rows, columns = matrix.shape
    wide = tf.transpose(matrix) if rows > columns else matrix
    wide /= tf.norm(wide) + 1e-7
    first, third, fifth = _QUINTIC
    for _ in range(_ITERATIONS):
        product = tf.matmul(wide, wide, transpose_b=True)
        weights = third * product + fifth * tf.matmul(product, product)
        wide = first * wide + tf.matmul(weights, wide)
    return tf.transpose(wide) if rows > columns else wide
