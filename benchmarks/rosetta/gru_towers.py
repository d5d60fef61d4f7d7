"""Our towers: a recurrent Keras model; the rest as in `cnn_towers.py`."""

from __future__ import annotations

import keras

from benchmarks.rosetta import cnn_towers, gru_keras


class Model(cnn_towers.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    def build(self) -> keras.Model:
        """Builds the network: Keras's."""
        return gru_keras.network()

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Makes the optimizer."""
        if self.task.optimizer == "sgd":
            return super().make_optimizer()
        rate, epsilon = self.task.learning_rate, self.task.epsilon
        return keras.optimizers.Adam(rate, epsilon=epsilon)
