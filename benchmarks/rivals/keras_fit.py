"""Keras `fit`, alone and under MirroredStrategy, as its documentation shows it.

The layers are Keras's own, with `tf.nn.lrn` for the normalization that Keras lacks. No
XLA (`jit_compile=False`) on a CPU, where it halves the rate; no moving averages, which
the towers and the tutorial's graph keep; a batch that stays in memory.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from benchmarks.rivals import common
from cifar10.process import entry_point

# So large that a variable after one update is the gradient to float32's precision, and
# a power of two, so that multiplying by it does not round.
_CHECKED_RATE = 2.0**40

WEIGHT_DECAY = 0.004


def start(*, replicas: int, batch_size: int) -> KerasFit:
    """Builds and compiles the model.

    Args:
        replicas: 1 for plain `fit`, more for MirroredStrategy over as many GPUs, or
            logical devices of the CPU, as towers would have.
        batch_size: Images in a step, of all replicas together.
    """
    entry_point.import_tensorflow()
    return KerasFit(replicas, batch_size)


class KerasFit:
    """A compiled model and its data."""

    precision = "float32"

    def __init__(self, replicas: int, batch_size: int) -> None:
        import keras
        import tensorflow as tf

        with _scope(replicas):
            self._model = _network()
            self._model.compile(
                keras.optimizers.SGD(common.LEARNING_RATE),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile="auto" if tf.config.list_physical_devices("GPU") else False,
            )
        self._batches = _repeated(*common.constant_batch(batch_size))

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the loss and gradients of a step of `fit`, from what it changes."""
        common.load_variables(self._model, values)
        self._model.optimizer.learning_rate = _CHECKED_RATE
        with common.full_float32():
            loss = self._fit(_repeated(images, labels), 1)
        gradients = {
            variable.path: (values[variable.path] - variable.numpy())
            / np.float32(_CHECKED_RATE)
            for variable in self._model.trainable_variables
        }
        common.load_variables(self._model, values)
        self._model.optimizer.learning_rate = common.LEARNING_RATE
        return loss, gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains in one call of `fit`; returns the seconds of the timed steps."""
        import keras

        clock = {}

        def read_clock(batch: int, logs: object = None) -> None:  # noqa: ARG001
            if batch + 1 == untimed:
                clock["began"] = time.perf_counter()
            elif batch + 1 == untimed + timed:
                clock["ended"] = time.perf_counter()

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=read_clock)
        common.insist_on_finite(self._fit(self._batches, untimed + timed, callback))
        return clock["ended"] - clock["began"]

    def _fit(self, batches: Any, steps: int, *callbacks: Any) -> float:
        history = self._model.fit(
            batches,
            steps_per_epoch=steps,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return float(history.history["loss"][-1])


def _scope(replicas: int) -> Any:
    """Returns the context that a model for so many replicas is built in."""
    import tensorflow as tf

    from cifar10.towers import devices

    if replicas == 1:
        return contextlib.nullcontext()
    placed = devices.place_towers(replicas).devices
    return tf.distribute.MirroredStrategy(list(placed)).scope()


def _repeated(images: np.ndarray, labels: np.ndarray) -> Any:
    """Returns a dataset that yields the same batch for ever."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(2)


def _network() -> Any:
    """Returns the tutorial's network; initial values come with the check."""
    import keras
    import tensorflow as tf
    from keras import layers, regularizers

    def normalization(name: str) -> Any:
        def normalize(inputs: tf.Tensor) -> tf.Tensor:
            return tf.nn.lrn(inputs, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)

        return layers.Lambda(normalize, name=name)

    def hidden(units: int, name: str) -> Any:
        decay = regularizers.L2(WEIGHT_DECAY / 2)
        return layers.Dense(
            units, activation="relu", kernel_regularizer=decay, name=name
        )

    images = net = keras.Input(common.IMAGE_SHAPE)
    for layer in (
        layers.Conv2D(64, 5, padding="same", activation="relu", name="conv1"),
        layers.MaxPooling2D(3, 2, padding="same"),
        normalization("norm1"),
        layers.Conv2D(64, 5, padding="same", activation="relu", name="conv2"),
        normalization("norm2"),
        layers.MaxPooling2D(3, 2, padding="same"),
        layers.Flatten(),
        hidden(384, "local3"),
        hidden(192, "local4"),
        layers.Dense(common.CLASSES, name="softmax_linear"),
    ):
        net = layer(net)
    return keras.Model(images, net)
