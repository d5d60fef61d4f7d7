"""Keras: layers, `compile` and `fit`; KERAS_BACKEND says what it computes with."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable

import keras
import numpy as np
from keras import layers

from benchmarks.rosetta.task import PREDICTED_AT_ONCE, SHAPES, Batch, Task, Values


def network(dropout: tuple[float, float, float]) -> keras.Model:
    """Builds the network, from images to logits."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(50, 3, padding="same", activation="relu"),
            layers.Conv2D(50, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(dropout[0]),
            layers.Conv2D(100, 3, padding="same", activation="relu"),
            layers.Conv2D(100, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(dropout[1]),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dropout(dropout[2]),
            layers.Dense(10),
        ]
    )


class Model:
    """A network with its loss and its optimizer."""

    def __init__(self, task: Task) -> None:
        if keras.backend.backend() == "torch":
            importlib.import_module("torch").set_flush_denormal(True)  # As the others.
        self.task = task
        self.network = self.build()
        self.optimizer = self.make_optimizer()
        self.optimizer.build(self.network.trainable_variables)
        self.fresh = [one.numpy().copy() for one in self.optimizer.variables]
        # Of logits: the only softmax is in here.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.network.compile(self.optimizer, loss)

    def build(self) -> keras.Model:
        """Builds the network."""
        return network(self.task.dropout)

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
        variables = [one.numpy().copy() for one in self.network.trainable_variables]
        return dict(zip(SHAPES[self.task.network], variables, strict=True))

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        generator = (batch for batch in batches)  # A list would be several inputs.
        # Keras warns at the end of every generator.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            return self.network.fit(generator, verbose=0).history["loss"][0]

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Computes logits, without dropout."""
        return self.network.predict(inputs, PREDICTED_AT_ONCE, verbose=0)
