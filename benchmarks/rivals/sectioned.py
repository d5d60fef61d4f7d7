"""One step that trains a model whole, in sections, or with tf.recompute_grad."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals import common
from cifar10.process import entry_point

_FEW = 8
_STATUS = Path("/proc/self/status")


def start(**options: Any) -> Sectioned:
    """Builds the step; the options are the arguments of `Sectioned`."""
    entry_point.import_tensorflow()
    return Sectioned(**options)


class Sectioned:
    """A training of one tower, ready to step.

    Args:
        model: As `--model`.
        sections: How many sections.
        recomputed: Whether `tf.recompute_grad` computes all but the last of them again,
            within one function.
        precision: As `--precision`.
        images: floating [count, height, width, channels], some batches in a row.
        labels: int32 [count].
        batch_size: Images of a batch.
        warm: Whether memory is counted from after a step with a few images, which
            leaves out the program, and not from before the first step.
        options: `depth` and `width` of the model.
    """

    def __init__(
        self,
        *,
        model: str,
        sections: int,
        recomputed: bool,
        precision: str,
        images: np.ndarray,
        labels: np.ndarray,
        batch_size: int,
        warm: bool,
        options: dict[str, int | None],
    ) -> None:

        import tensorflow as tf

        from cifar10.sections.memory import return_freed_blocks
        from cifar10.towers import devices, hardware
        from cifar10.towers.towers import TowerBuilder

        placement = devices.place_towers(1)
        self._device = placement.devices[0]
        self.precision = hardware.resolve_precision(precision, placement.devices)
        planner = _planner(
            placement, model, self.precision, images[:batch_size], options
        )
        plan = planner.into(sections)
        # The variables are there before the start.
        self._planned = plan.total_bytes - planner.variable_bytes
        self._begin = list(plan.cuts)
        tower = _tower(planner, plan, recomputed=recomputed)
        self._builder = TowerBuilder(
            planner.state, placement.devices, tower=tower, update=_update()
        )
        if plan.places and not recomputed and not placement.on_gpus:
            return_freed_blocks()  # As a training does.
        self._batches = [
            (images[place : place + batch_size], labels[place : place + batch_size])
            for place in range(0, len(images) - batch_size + 1, batch_size)
        ]
        self._steps = 0
        if warm:
            few = images[:_FEW], labels[:_FEW]
            self._builder.step([tuple(map(tf.identity, few))]).tower_losses.numpy()
        self._before = _reset_peak(self._device)

    def plan(self) -> tuple[int, list[str]]:
        """Returns the planned bytes, and the layers that sections begin with."""
        return self._planned, self._begin

    def step(self) -> tuple[float, float]:
        """Runs one step; returns its seconds and its loss."""
        import tensorflow as tf

        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        with tf.device(self._device):
            images, labels = map(tf.identity, batch)
        began = time.perf_counter()
        result = self._builder.step([(images, labels)])
        loss = float(result.metrics["total_loss"])
        seconds = time.perf_counter() - began
        common.insist_on_finite(loss)
        return seconds, loss

    def peak(self) -> int:
        """Returns the most bytes that steps have taken, above those before them."""
        return _peak(self._device) - self._before


def _reset_peak(device: str) -> int:
    """Forgets earlier peaks; returns the bytes that are taken now."""
    if device.startswith("/gpu"):
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(device[1:].upper())
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak(device)


def _peak(device: str) -> int:
    if device.startswith("/gpu"):
        import tensorflow as tf

        return tf.config.experimental.get_memory_info(device[1:].upper())["peak"]
    kilobytes = re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text(encoding="ascii"))
    return int(kilobytes[1]) * 1024


def _planner(
    placement: Any,
    name: str,
    precision: str,
    images: np.ndarray,
    options: dict[str, int | None],
) -> Any:
    """Builds the model, a momentum optimizer and what plans their step."""
    import keras
    import tensorflow as tf

    from cifar10 import model as models
    from cifar10.models.registry import build_model
    from cifar10.sections.planning import Planner
    from cifar10.towers import devices
    from cifar10.towers.towers import Tower
    from cifar10.towers.update import TrainState

    home = devices.variable_device("auto", placement)
    model = build_model(
        name,
        images.shape[1:],
        common.CLASSES,
        precision=precision,
        device=home,
        options=options,
    )
    with tf.device(home):
        optimizer = keras.optimizers.SGD(0.0, momentum=0.9)
    return Planner(
        TrainState(model, optimizer, home),
        Tower(models.inference, models.loss),
        placement.devices,
        tf.TensorSpec(images.shape),
    )


def _update() -> Any:
    import tensorflow as tf

    from cifar10.towers.update import Update

    return Update(lambda _: tf.constant(0.01), lambda _: tf.constant(0.999))


def _tower(planner: Any, plan: Any, *, recomputed: bool) -> Any:
    from benchmarks.rivals.recomputed import RecomputedTower
    from cifar10 import model as models
    from cifar10.sections.cutting import cut
    from cifar10.sections.sectioned_tower import SectionedTower

    if recomputed:
        sections = cut(planner.state.model, plan.places)
        return RecomputedTower(models.inference, models.loss, sections)
    return SectionedTower(planner.tower, plan.places) if plan.places else planner.tower
