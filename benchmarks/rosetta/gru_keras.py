"""Keras: its own GRU; the rest as in `cnn_keras.py`."""

from __future__ import annotations

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


class Model(cnn_keras.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    def build(self) -> keras.Model:
        """Builds the network."""
        return network()

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Makes the optimizer."""
        if self.task.optimizer == "sgd":
            return super().make_optimizer()
        rate, epsilon = self.task.learning_rate, self.task.epsilon
        return keras.optimizers.Adam(rate, epsilon=epsilon)
