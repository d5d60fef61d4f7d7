"""Keras `fit`, with MirroredStrategy if there are several workers.

    python keras_fit.py [mirrored] JOB.json

Saves by BackupAndRestore at ends of epochs, its default, and keeps two
(double_checkpoint), which its documents recommend against damage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import protocol
import tensorflow as tf
from keras import layers


class Watch(keras.callbacks.Callback):
    """Tells the protocol each update, which the optimizer counts across restarts."""

    def __init__(self, job: protocol.Job) -> None:
        super().__init__()
        self._job, self._last = job, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes an update."""
        del batch, logs
        optimizer = self.model.optimizer
        step = int(optimizer.iterations.numpy())
        if step != self._last:
            self._last = step
            rate = keras.ops.convert_to_numpy(optimizer.learning_rate)
            protocol.reached(self._job, step, float(rate))


def build(job: protocol.Job, shape: tuple[int, ...], classes: int) -> keras.Model:
    """Returns the compiled network."""
    model = keras.Sequential(
        [
            keras.Input(shape),
            layers.Rescaling(1 / 127.5, offset=-1),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(classes, kernel_initializer="zeros"),
        ]
    )
    rate: Any = job.learning_rate
    if not job.constant:
        rate = keras.optimizers.schedules.CosineDecay(rate, job.steps * job.accumulate)
    every = job.accumulate if job.accumulate > 1 else None
    optimizer = keras.optimizers.SGD(
        rate, job.momentum, gradient_accumulation_steps=every
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def run(job: protocol.Job, strategy: Any) -> None:
    """Trains with `fit`, or scores the newest weights with `evaluate`."""
    keras.utils.set_random_seed(job.seed)
    tf.config.experimental.enable_op_determinism()
    x, y, x_test, y_test = job.arrays()
    classes = max(4, int(y.max()) + 1)
    with strategy.scope():
        model = build(job, x.shape[1:], classes)
    batch_size = job.batch_size // job.accumulate
    if job.task == "evaluate":
        model.load_weights(Path(job.folder, "last.weights.h5"))
        loss, accuracy = model.evaluate(x_test, y_test, batch_size)
        protocol.answer(job, loss=loss, accuracy=accuracy)
        return
    best = keras.callbacks.ModelCheckpoint(
        Path(job.folder, "best.keras"), save_best_only=True
    )
    callbacks = [
        keras.callbacks.BackupAndRestore(
            Path(job.folder, "backup"), double_checkpoint=True
        ),
        best,
        keras.callbacks.TerminateOnNaN(raise_error=True),
        Watch(job),
    ]
    model.fit(
        x,
        y,
        batch_size,
        epochs=-(-job.steps // job.epoch_steps),
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=2,
    )
    model.save_weights(Path(job.folder, "last.weights.h5"))
    step = int(model.optimizer.iterations.numpy())
    protocol.answer(job, model.get_weights(), step=step, best=float(best.best))


def main() -> None:
    """Does the job."""
    job, mirrored = protocol.read_job(), "mirrored" in sys.argv
    if job.task == "describe":
        protocol.describe(
            job,
            f"Keras fit{', MirroredStrategy' if mirrored else ''}",
            f"{keras.__version__} on TensorFlow {tf.__version__}",
            "backup/latest.weights.h5",
            "https://keras.io/api/callbacks/backup_and_restore/",
            workers=2 if mirrored else 1,
            lacks={} if mirrored else {"workers": "fit alone has one"},
        )
        return
    strategy = tf.distribute.get_strategy()
    if job.workers > 1:
        [cpu] = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration()] * job.workers
        tf.config.set_logical_device_configuration(cpu, logical)
        names = [f"/cpu:{number}" for number in range(job.workers)]
        strategy = tf.distribute.MirroredStrategy(names)
    run(job, strategy)


if __name__ == "__main__":
    main()
