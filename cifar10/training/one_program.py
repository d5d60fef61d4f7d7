"""Several steps as one program, compiled by XLA, that makes its own images.

This is `--xla --steps_per_call` where one device computes complete steps. The data set
lies in its memory, and images, towers, average and update of the steps of a call are
one loop there. Only plans of the batches go in: XLA has no operation for their order.
The steps between calls compile their images too, so that all round alike.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.config.config import ResolvedConfig
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.input import on_device, pipeline
from cifar10.input.dataset_base import Images
from cifar10.towers.devices import Placement, distorts_on_towers
from cifar10.towers.graphs import traced
from cifar10.towers.towers import Batch, StepResult, TowerBuilder


def fits_one_program(
    config: ResolvedConfig,
    placement: Placement,
    towers: TowerBuilder,
    images: Images,
    labels: np.ndarray,
) -> bool:
    """Returns whether the steps of a call, of whole models, are one program."""
    if config.steps_per_call == 1 or not config.speed.xla:
        return False
    if not pipeline.is_in_memory(images):  # XLA reads no files.
        return False
    # An all-reduce cannot be part of a program, and batches before an update save
    # memory by being computed one after another.
    if isinstance(towers, ReplicaBuilder) or config.batch.accumulate > 1:
        return False
    fits = on_device.fits(images, labels)
    on_towers = distorts_on_towers(config.speed.input_device, placement, fits=fits)
    on_one_gpu = on_towers and {*placement.devices} == {towers.state.device}
    return on_one_gpu or not placement.on_gpus


class PlannedBatches(Sequence):
    """A step's batches, one per tower, which are made when one is first used."""

    def __init__(self, program: "OneProgram", plan: tuple[tf.Tensor, ...]) -> None:
        self.plan = plan  # What a `pipeline.Plan` holds, but for None.
        self._made = functools.cache(lambda: program.batches(plan))

    def __getitem__(self, tower: Any) -> Any:
        return self._made()[tower]

    def __len__(self) -> int:
        return len(self._made())


class OneProgram(TowerBuilder):
    """Runs several steps, on a stored training set, as one program of a device.

    `towers` are those that it runs; what it stacks are `PlannedBatches`.
    """

    def __init__(
        self,
        towers: TowerBuilder,
        config: ResolvedConfig,
        images: Images,
        labels: np.ndarray,
        maker: pipeline.BatchMaker,
    ) -> None:
        super().__init__(
            towers.state, towers.devices, tower=towers.tower, update=towers.update
        )
        self._config = config
        self._maker = maker
        self._device = towers.devices[0]
        self._examples = len(images)
        self._batch_slice = pipeline.BatchSlice(
            0, config.global_batch_size, global_batch_size=config.global_batch_size
        )
        self._stored = on_device.store(images, labels, [self._device])[self._device]

    def freeze(self, names: Sequence[str]) -> None:
        """Trains all variables but these from now on; all is compiled anew."""
        super().freeze(names)
        self._steps = traced(self._trace_steps, jit_compile=True)
        self._single = traced(self._distorted, jit_compile=True)

    def steps(self, batches: Sequence[Any]) -> StepResult:
        """Runs several steps as one program."""
        with tf.device(self._device):
            return super().steps(batches)

    def stack(self, batches: Sequence[Any]) -> list[Any]:
        """Returns the plans of several steps as tensors."""
        with tf.device("/cpu:0"):  # So that a GPU is sent one copy.
            parts = zip(*(planned.plan for planned in batches), strict=True)
            return [tf.stack(part) for part in parts]

    def unstack(self, stacked: list[Any], step: tf.Tensor | int) -> list[Batch]:
        """Makes the batches of one of the steps within the program."""
        return self._distorted([part[step] for part in stacked])

    def batches(self, plan: tuple[tf.Tensor, ...]) -> list[Batch]:
        """Makes the batches of a step that runs by itself."""
        with tf.device(self._device):
            return self._single(plan)

    def open_batches(self, start_batch: int, step: int) -> pipeline.PrefetchQueues:
        """Opens the input like `Training.open_batches`, as `PlannedBatches`."""
        config = self._config
        image_size = config.stage(step).image_size
        maker = self._maker = dataclasses.replace(self._maker, image_size=image_size)

        def planned(step: tf.Tensor) -> tuple[tuple[tf.Tensor, ...]]:
            plan = maker.plan(step, self._batch_slice, self._examples)
            return (tuple(part for part in plan if part is not None),)

        plans = tf.data.Dataset.counter(start_batch).map(planned)
        plans = pipeline.without_autotuning(plans)
        queue = _PlanQueue(plans, ["/cpu:0"], config.steps_per_call)
        queue.program = self
        return queue

    def _distorted(self, plan: Sequence[tf.Tensor]) -> list[Batch]:
        planned = pipeline.Plan(*plan)
        chosen, labels = (tf.gather(of_all, planned.chosen) for of_all in self._stored)
        made = self._maker.make(chosen, labels, planned, self._batch_slice)
        towers = len(self.devices)
        return [*zip(*(tf.split(part, towers) for part in made), strict=True)]


class _PlanQueue(pipeline.PrefetchQueues):
    program: OneProgram

    def get(self) -> Sequence[Batch]:
        (plan,) = super().get()
        return PlannedBatches(self.program, plan)
