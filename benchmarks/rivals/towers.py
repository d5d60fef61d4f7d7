"""Our towers, put together from the same parts as in `cifar10.training`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.rivals import common, precision as precisions
from cifar10 import cli, datasets


def start(**options: Any) -> Towers:
    """Builds the towers; the options are the arguments of `Towers`."""
    cli.import_tensorflow(verbose=False)
    return Towers(**options)


class Towers:
    """Towers with their input, ready to step.

    Args:
        towers: Number of towers.
        batch_size: Images for each tower in a step.
        precision: As `--precision`.
        dataset: What to train on, with the tutorial's distortions; None for the same
            batch of noise at every step.
    """

    def __init__(
        self,
        *,
        towers: int,
        batch_size: int,
        precision: str,
        dataset: datasets.Dataset | None = None,
    ) -> None:
        from cifar10 import devices

        placed = devices.place_towers(towers).devices
        self.precision = precisions.resolve(precision, placed)
        self._model = precisions.build_model(self.precision)
        self._builder = _tower_builder(self._model, placed)
        self._global_batch_size = batch_size * towers
        self._queues = None
        if dataset:
            self._queues = common.tutorial_queues(dataset, batch_size, placed)
            self._next_batches = self._queues.get
        else:
            constant = self._split(*common.constant_batch(self._global_batch_size))
            self._next_batches = lambda: constant

    def initial_values(self) -> dict[str, np.ndarray]:
        """Returns the values of the variables by name."""
        return {
            variable.path: variable.numpy()
            for variable in self._model.trainable_variables
        }

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the loss and the averaged gradients of the step that is timed.

        Several copies of the batch go into a larger one: the mean over them is the
        same.
        """
        copies = self._global_batch_size // len(images)
        batches = self._split(
            np.concatenate([images] * copies), np.concatenate([labels] * copies)
        )
        self._load(values)
        with common.full_float32():
            result = self._builder.step(batches, summaries=True)
        self._load(values)
        gradients = {
            name: gradient.numpy() for name, gradient in result.gradients.items()
        }
        return float(result.metrics["total_loss"]), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        return common.seconds_of(self._step, untimed, timed)

    def close(self) -> None:
        """Stops the input."""
        if self._queues:
            self._queues.close()

    def _step(self) -> float:
        return float(self._builder.step(self._next_batches()).metrics["total_loss"])

    def _load(self, values: dict[str, np.ndarray]) -> None:
        for variable in self._model.trainable_variables:
            variable.assign(values[variable.path])

    def _split(self, images: np.ndarray, labels: np.ndarray) -> list:
        """Returns one (images, labels) for each tower, on its device."""
        import tensorflow as tf

        devices = self._builder.devices
        batches = []
        for device, *batch in zip(
            devices,
            np.split(images, len(devices)),
            np.split(labels, len(devices)),
            strict=True,
        ):
            with tf.device(device):
                batches.append(tuple(tf.identity(part) for part in batch))
        return batches


def _tower_builder(model: Any, devices: Sequence[str]) -> Any:
    import keras

    from cifar10 import model as models, schedule
    from cifar10.towers import TowerBuilder, TrainState

    return TowerBuilder(
        TrainState(model, keras.optimizers.SGD(common.LEARNING_RATE)),
        devices,
        inference=models.inference,
        loss=precisions.loss_function(),
        learning_rate=schedule.StaircaseDecay(common.LEARNING_RATE, 350, 50_000),
        average_decay=lambda step: schedule.average_decay(0.9999, step),
    )
