"""Keras `fit`, with MirroredStrategy if there are several replicas.

Saves by BackupAndRestore at ends of epochs, its default, and keeps two
(double_checkpoint), which its documents recommend against damage.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf


def strategy(replicas: int, seed: int) -> tf.distribute.Strategy:
    """Returns the strategy for replicas on the CPU, which train reproducibly."""
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()
    if replicas == 1:
        return tf.distribute.get_strategy()
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    names = [f"/cpu:{number}" for number in range(replicas)]
    return tf.distribute.MirroredStrategy(names)


def compiled(network: keras.Model, rate: Any, momentum: float, accumulate: int) -> Any:
    """Returns a network, for images from -1 to 1, that can be trained."""
    scale = keras.layers.Rescaling(1 / 127.5, offset=-1)
    model = keras.Sequential([keras.Input(network.input_shape[1:]), scale, network])
    every = accumulate if accumulate > 1 else None
    sgd = keras.optimizers.SGD(rate, momentum, gradient_accumulation_steps=every)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(sgd, loss, metrics=["accuracy"])
    return model


def train(
    model: keras.Model,
    trained: Any,
    scored: Any,
    folder: str,
    batch_size: int,
    batches: int,
    on_update: Callable[[int, float], None],
) -> float:
    """Trains for so many batches, from the last backup; returns the best score."""

    def tell(*_: Any, **__: Any) -> None:
        # The optimizer counts across restarts.
        both = model.optimizer.iterations, model.optimizer.learning_rate
        on_update(*map(keras.ops.convert_to_numpy, both))

    files, callbacks = Path(folder), keras.callbacks
    best = callbacks.ModelCheckpoint(files / "best.keras", save_best_only=True)
    model.fit(
        *trained,
        batch_size,
        epochs=-(-batches * batch_size // len(trained[1])),
        validation_data=scored,
        callbacks=[
            callbacks.BackupAndRestore(files / "backup", double_checkpoint=True),
            best,
            callbacks.TerminateOnNaN(raise_error=True),
            callbacks.LambdaCallback(on_train_batch_end=tell),
        ],
        verbose=2,
    )
    model.save_weights(files / "last.weights.h5")
    return best.best
