"""Our towers: any Keras model, computed by towers and updated in one place."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from benchmarks.rosetta import cnn_keras
from benchmarks.rosetta.task import PREDICTED_AT_ONCE, SHAPES, Batch, Task, Values
from cifar10 import model as models
from cifar10.towers import devices
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update


class Model:
    """A network with its loss and its optimizer."""

    def __init__(self, task: Task, towers: int = 1) -> None:
        self.task = task
        placement = devices.place_towers(towers)
        home = devices.variable_device("auto", placement)
        with tf.device(home):
            self.network = self.build()
            self.optimizer = self.make_optimizer()
        self.builder = TowerBuilder(
            TrainState(self.network, self.optimizer, home),
            placement.devices,
            # Of logits: the only softmax is in this loss.
            tower=Tower(models.inference, models.loss),
            update=Update(
                lambda examples: tf.constant(task.learning_rate),  # noqa: ARG005
                average_decay=None,  # No other row keeps moving averages.
            ),
        )
        self.fresh = [one.numpy() for one in self.optimizer.variables]

    def build(self) -> keras.Model:
        """Builds the network: Keras's."""
        return cnn_keras.network(self.task.dropout)

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Makes the optimizer."""
        return keras.optimizers.SGD(self.task.learning_rate, self.task.momentum)

    def load(self, values: Values) -> None:
        """Begins anew from these values."""
        variables = [*self.network.trainable_variables, *self.optimizer.variables]
        for own, value in zip(variables, [*values.values(), *self.fresh], strict=True):
            own.assign(value)

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of now."""
        variables = [one.numpy() for one in self.network.trainable_variables]
        return dict(zip(SHAPES[self.task.network], variables, strict=True))

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        losses = []
        for batch in batches:
            parts = [np.split(part, len(self.builder.devices)) for part in batch]
            tensors = [tuple(map(tf.constant, own)) for own in zip(*parts, strict=True)]
            losses.append(self.builder.step(tensors).metrics["total_loss"])
        return float(tf.reduce_mean(losses))

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Computes logits, without dropout."""
        return self.network.predict(inputs, PREDICTED_AT_ONCE, verbose=0)

    def accuracy(self, inputs: np.ndarray, labels: np.ndarray) -> float:
        """Returns the part of the labels that have the largest logit."""
        return float(np.mean(self.predict(inputs).argmax(1) == labels))
