"""Our towers, as a run of `train.py` has them, or their input alone."""

from __future__ import annotations

import contextlib
import math
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
        call: Steps in a call to TensorFlow; None for as many as a run has, which
            on GPUs is more than one.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        towers: int = 1,
        precision: str = "float32",
        dataset: Dataset | None = None,
        trains: bool = True,
        call: int | None = None,
    ) -> None:
        from cifar10.input import calls
        from cifar10.training import assembly

        self._global_batch_size = batch_size * towers
        config = Config(
            num_gpus=towers,
            batch_size=batch_size,
            precision=precision,
            steps_per_call=call,
        )
        training = assembly.assemble(
            config, dataset or common.black_images((32, 32, 3), batch_size * towers)
        )
        self.precision = training.config.network.precision
        self._builder = training.towers
        self._model = self._builder.state.model
        self._trains = trains
        self._call = most = training.steps_per_call
        self._stack = contextlib.ExitStack()
        if dataset:
            queues = training.open_batches(0, 0, in_calls=most > 1)
            self._next_batches = self._stack.enter_context(queues).get
        else:
            constant = self._split(*common.constant_batch(self._global_batch_size))
            constant = calls.stacked([constant], most) if most > 1 else constant
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
        """Trains, or takes batches; returns the seconds of the timed steps.

        Whole calls are made, and their time is divided among their steps.
        """
        before, after = (math.ceil(count / self._call) for count in (untimed, timed))
        seconds = common.seconds_of(self._run_call, before, after)
        return seconds * timed / (after * self._call)

    def close(self) -> None:
        """Stops the input."""
        self._stack.close()

    def _run_call(self) -> Any:
        batches = self._next_batches()
        if not self._trains:
            return batches[0][1][..., 0][-1] if self._call > 1 else batches[0][1][0]
        if self._call > 1:
            # A call that a period shortens repeats its last batch, at the same cost.
            return self._builder.steps(batches, self._call).metrics["total_loss"][-1]
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
