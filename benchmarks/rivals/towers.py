"""Our towers, as a training of `train.py` has them, or their input alone."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from benchmarks.rivals import common
from cifar10.config.config import Config
from cifar10.input.dataset_base import Dataset
from cifar10.process import entry_point


def start(**options: Any) -> Towers:
    """Builds the towers; the options are the arguments of `Towers`."""
    entry_point.import_tensorflow()
    return Towers(**options)


class Towers:
    """Towers with their input, ready to step.

    Args:
        batch_size: Images for each tower in a step.
        towers: Number of towers.
        precision: As `--precision`.
        dataset: What to train on, with the tutorial's distortions; None for the same
            batch of noise at every step.
        trains: Whether the batches are trained on, and not only taken.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        towers: int = 1,
        precision: str = "float32",
        dataset: Dataset | None = None,
        trains: bool = True,
    ) -> None:
        from cifar10.training import assembly

        self._global_batch_size = batch_size * towers
        config = Config(num_gpus=towers, batch_size=batch_size, precision=precision)
        training = assembly.assemble(
            config, dataset or common.black_images((32, 32, 3), batch_size * towers)
        )
        self.precision = training.config.network.precision
        self._builder = training.towers
        self._model = self._builder.state.model
        self._trains = trains
        self._stack = contextlib.ExitStack()
        if dataset:
            batches = self._stack.enter_context(training.open_batches(0, 0))
            self._next_batches = batches.get
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
        common.load_variables(self._model, values)
        with common.full_float32():
            found = self._builder.gradients(batches)
            result = self._builder.step(batches)
        common.load_variables(self._model, values)
        gradients = {name: gradient.numpy() for name, gradient in found.items()}
        return float(result.metrics["total_loss"]), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains, or takes batches; returns the seconds of the timed steps."""
        return common.seconds_of(self._step, untimed, timed)

    def close(self) -> None:
        """Stops the input."""
        self._stack.close()

    def _step(self) -> Any:
        batches = self._next_batches()
        if not self._trains:
            return batches[0][1][0]  # A label.
        return self._builder.step(batches).metrics["total_loss"]

    def _split(self, images: np.ndarray, labels: np.ndarray) -> list:
        """Returns one (images, labels) for each tower, on its device."""
        import tensorflow as tf

        devices = self._builder.devices
        parts = (np.split(part, len(devices)) for part in (images, labels))
        batches = []
        for device, *batch in zip(devices, *parts, strict=True):
            with tf.device(device):
                batches.append(tuple(tf.identity(part) for part in batch))
        return batches
