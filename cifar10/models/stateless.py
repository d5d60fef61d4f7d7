"""Calls a model with values in place of its variables."""

import keras
import tensorflow as tf

from cifar10.models.layer_tree import GENERATOR_STATE, unseeded


class Call(keras.StatelessScope):
    """Computes with given values of a model's variables, and keeps those assigned.

    As in Keras's `fit`, a layer that assigns a trainable variable trains the assigned
    value: an assignment has no gradient of its own.
    """

    def __init__(self, model: keras.Model, mapping: list[tuple]) -> None:
        # Keras makes a generator in each thread of replicas. No value of it is used.
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self._given = {id(variable): value for variable, value in mapping}
        self._unseeded = unseeded(model)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value last assigned, or else the given one."""
        return super().get_current_value(self._own(variable))

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keeps a value that a layer assigns to a variable."""
        variable, value = self._own(update[0]), update[1]
        given = self._given.get(id(variable))
        is_trained = variable.trainable and given is not None
        value = _assigned(given, value) if is_trained else tf.stop_gradient(value)
        super().add_update((variable, value))

    def _own(self, variable: keras.Variable) -> keras.Variable:
        if self._unseeded is None or id(variable) in self._given:
            return variable
        return self._unseeded if variable.name == GENERATOR_STATE else variable


@tf.custom_gradient
def _assigned(given: tf.Tensor, value: tf.Tensor) -> tuple:
    """Returns an assigned value, whose gradient is that of the variable."""
    del given
    return tf.identity(value), lambda gradient: (gradient, None)
