"""Our towers, put together from the same parts as in `cifar10.training.train`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.rivals import common
from cifar10.input import datasets
from cifar10.process import entry_point

if TYPE_CHECKING:
    from cifar10.towers import devices
    from cifar10.towers.towers import TowerBuilder


def start(**options: Any) -> Towers:
    """Builds the towers; the options are the arguments of `Towers`."""
    entry_point.import_tensorflow()
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
        from cifar10.towers import devices, hardware

        placement = devices.place_towers(towers)
        self.precision = hardware.resolve_precision(precision, placement.devices)
        self._builder = _tower_builder(placement, self.precision)
        self._model = self._builder.state.model
        self._global_batch_size = batch_size * towers
        self._stack = contextlib.ExitStack()
        if dataset:
            batches = common.tutorial_batches(dataset, batch_size, placement)
            self._next_batches = self._stack.enter_context(batches).get
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
            found = self._builder.gradients(batches)
            result = self._builder.step(batches)
        self._load(values)
        gradients = {name: gradient.numpy() for name, gradient in found.items()}
        return float(result.metrics["total_loss"]), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        return common.seconds_of(self._step, untimed, timed)

    def close(self) -> None:
        """Stops the input."""
        self._stack.close()

    def _step(self) -> Any:
        return self._builder.step(self._next_batches()).metrics["total_loss"]

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


def _tower_builder(placement: devices.Placement, precision: str) -> TowerBuilder:
    """Builds what `cifar10.training.train` builds by default."""
    import tensorflow as tf

    from cifar10 import model as models
    from cifar10.models.registry import build_model
    from cifar10.towers import devices, schedule
    from cifar10.towers.optimizers import build_optimizer
    from cifar10.towers.towers import Tower, TowerBuilder
    from cifar10.towers.update import TrainState, Update

    beside = devices.variable_device("auto", placement)
    model = build_model(
        "tutorial",
        common.IMAGE_SHAPE,
        common.CLASSES,
        precision=precision,
        device=beside,
    )
    with tf.device(beside):
        optimizer = build_optimizer(
            "sgd", common.LEARNING_RATE, 0.0, scale_loss=precision == "float16"
        )
    return TowerBuilder(
        TrainState(model, optimizer, beside),
        placement.devices,
        tower=Tower(models.inference, models.loss),
        update=Update(
            schedule.Decay(common.LEARNING_RATE, schedule.staircase, 350 * 50_000),
            lambda step: schedule.average_decay(0.9999, step),
        ),
    )
