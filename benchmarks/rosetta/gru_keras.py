"""Keras: its own GRU; the rest as in `cnn_keras.py`."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks.rosetta import cnn_keras


def network() -> keras.Model:
    """Builds the network, from numbers of words to logits."""
    return keras.Sequential(
        [
            keras.Input((150,), dtype="int32"),
            layers.Embedding(30_000, 125),
            layers.GRU(100),  # The last state; the form with two biases is its default.
            layers.Dense(2),
        ]
    )


class Adam(keras.optimizers.Adam):
    """Adam that adds up the gradients of a repeated word before it squares them.

    On TensorFlow they come as separate slices, and Keras 3.15 squares each of them.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable."""
        if keras.backend.backend() == "tensorflow":
            gradient = keras.ops.add(gradient, 0.0)  # Makes one array of slices.
        super().update_step(gradient, variable, learning_rate)


class Model(cnn_keras.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    adam = Adam

    def build(self) -> keras.Model:
        """Builds the network."""
        return network()

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Makes the optimizer."""
        if self.task.optimizer == "sgd":
            return super().make_optimizer()
        return self.adam(self.task.learning_rate, epsilon=self.task.epsilon)
