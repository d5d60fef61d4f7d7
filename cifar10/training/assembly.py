"""Builds the parts of a training: variables, towers, batches."""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config.config import ResolvedConfig
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.errors import UsageError
from cifar10.input import datasets, on_device, pipeline
from cifar10.models import custom, names
from cifar10.sections import assembly as sections
from cifar10.towers import devices, hardware, optimizers, schedule
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update
from cifar10.training import stages


def build_states(
    config: ResolvedConfig,
    placement: devices.Placement,
    replicas: int,
    dataset: datasets.Dataset,
    images: datasets.Images,
) -> list[TrainState]:
    """Builds the model and what its training updates, once for each replica."""
    if replicas == 1:
        homes = [
            devices.variable_device(config.variable_device, placement, config.optimizer)
        ]
    elif config.variable_device != "auto":
        raise UsageError(
            f"--variable_device {config.variable_device}: mirrored variables are on "
            "every tower's device.\nLeave it out, or give --variable_update towers."
        )
    else:
        homes = list(placement.devices)
    states = []
    for home in homes:
        state = build_state(config, home, images.shape[1:], dataset.classes)
        prepare = functools.partial(pipeline.prepare, distortion=config.distortions)
        models.initialize(state.model, config.model, images, prepare)
        states.append(state)
    return states


def build_state(
    config: ResolvedConfig, home: str, shape: tuple[int, int, int], classes: int
) -> TrainState:
    """Builds the model with its initial values, and its optimizer, on a device."""
    image_shape = pipeline.image_shape(config.distortions, shape)
    model = models.build(
        config.model,
        image_shape,
        classes,
        precision=config.precision,
        seed=config.seed,
        device=home,
        options={option: getattr(config, option) for option in models.OPTIONS},
        room=hardware.memory().available,
    )
    if names.is_code(config.model):
        custom.check_training(config.model, model, image_shape, classes)
    if config.stages or config.freeze:
        stages.prepare(config, model, image_shape, classes)
    with tf.device(home):  # The optimizer's scalars are variables too.
        optimizer = optimizers.build(
            config.optimizer,
            config.learning_rate,
            config.momentum,
            config.optimizer_arguments,
            variables=model.trainable_variables,
            scale_loss=config.precision == "float16",
            scale_updates=config.pretrained_rate != 1.0,
        )
    return TrainState(model, optimizer, home)


def build_towers(
    config: ResolvedConfig,
    placement: devices.Placement,
    states: list[TrainState],
    strategy: tf.distribute.Strategy | None,
    cluster: Cluster | None,
    images: datasets.Images,
    *,
    class_weights: np.ndarray | None = None,
    update: Update | None = None,
) -> tuple[TowerBuilder, str | None]:
    """Builds the towers and their update.

    `strategy` reduces over several sets of variables; it is None if there is only one.
    `class_weights` are those of the loss; `update` replaces the training's update.
    Returns the towers, and a description of their sections if there are any.
    """
    tower, description = build_tower(config, class_weights), None
    update = update or build_update(config, len(images))
    if sections.is_requested(config, states[0].model):
        shape = pipeline.image_shape(config.distortions, images.shape[1:])
        planner = sections.build_planner(
            config, placement, states[0], tower, update, shape, len(states)
        )
        sharing = cluster.workers_of_this_machine if cluster else 1
        tower, description = sections.build_tower(config, placement, planner, sharing)
    batch_devices = placement.batch_devices(config.accumulate)
    towers = TowerBuilder(states[0], batch_devices, tower=tower, update=update)
    if strategy is not None:
        towers = ReplicaBuilder(
            strategy,
            states,
            batch_devices,
            first_tower=cluster.index * len(batch_devices) if cluster else 0,
            tower=tower,
            update=update,
        )
    return towers, description


def build_tower(
    config: ResolvedConfig, class_weights: np.ndarray | None = None
) -> Tower:
    """Builds what each tower computes."""
    loss = functools.partial(models.loss, label_smoothing=config.label_smoothing)
    if class_weights is not None:
        loss = functools.partial(loss, class_weights=class_weights)
    return Tower(models.inference, loss, xla=config.xla)


def build_update(config: ResolvedConfig, examples_per_epoch: int) -> Update:
    """Builds the rule of the update."""
    learning_rate: schedule.Schedule
    if config.schedule_ends:
        examples = config.max_steps * config.global_batch_size
        kind = schedule.ENDING[config.schedule]
        learning_rate = kind(config.learning_rate, examples)
    else:
        learning_rate = schedule.StaircaseDecay(
            config.learning_rate, config.epochs_per_decay, examples_per_epoch
        )
    if config.warmup_epochs:
        rising = config.warmup_epochs * examples_per_epoch
        learning_rate = schedule.Warmup(learning_rate, rising, config.global_batch_size)
    return Update(
        learning_rate,
        functools.partial(schedule.average_decay, config.moving_average_decay),
        clip_norm=config.clip_norm,
        halts=config.on_nan != "skip",
    )


def build_maker(config: ResolvedConfig, classes: int) -> pipeline.BatchMaker:
    """Builds what makes a batch of the images that are chosen for it."""
    if not config.augmentation:
        return pipeline.make_batch
    from cifar10.input.augmentation.batches import AugmentedBatches

    return AugmentedBatches(config.augmentation, classes)


def open_batches(
    config: ResolvedConfig,
    placement: devices.Placement,
    cluster: Cluster | None,
    images: datasets.Images,
    labels: np.ndarray,
    start_batch: int,
    step: int,
    make: pipeline.BatchMaker = pipeline.make_batch,
) -> pipeline.PrefetchQueues:
    """Opens the input, on the towers' GPUs or on the CPU, at a batch.

    Images are as the stage wants them that comes after `step` steps.
    """
    batch_devices = placement.batch_devices(config.accumulate)
    fits = on_device.fits(images, labels)
    order: dict[str, Any] = {
        "batch_size": config.batch_size,
        "distortion": config.distortions,
        "seed": config.seed,
        "start_step": start_batch,
        "image_size": config.stage(step).image_size,
        "make": make,
        "shard": (cluster.index, len(cluster.workers)) if cluster else (0, 1),
    }
    batches: Iterable
    if devices.distorts_on_towers(config.input_device, placement, fits=fits):
        batches = on_device.device_batches(images, labels, batch_devices, **order)
    else:
        towers = len(batch_devices)
        batches = pipeline.training_batches(images, labels, towers=towers, **order)
    capacity = max(pipeline.QUEUE_CAPACITY, config.steps_per_call)
    return pipeline.PrefetchQueues(batches, batch_devices, capacity)
