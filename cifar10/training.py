"""Trains a model: puts data, model, towers and loop together.

The only module that knows all others.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import (
    config as configuration,
    datasets,
    device_input,
    devices,
    distortions,
    input as input_queues,
    model as models,
    optimizers,
    precision,
    retention,
    run_directory,
    schedule,
    settings as run_settings,
)
from cifar10.config import Config
from cifar10.errors import UsageError
from cifar10.loop import Loop
from cifar10.progress import Progress
from cifar10.tower import Tower
from cifar10.towers import TowerBuilder
from cifar10.train_state import TrainState
from cifar10.update import Update

# What determines the result: a resumed run has to agree in it.
HYPERPARAMETERS = (*configuration.result_determining(), "global_batch_size")


def train(config: Config) -> int:
    """Trains to `config.max_steps`, going on from the newest checkpoint.

    Args:
        config: The configuration.

    Returns:
        The step reached.

    Raises:
        UsageError: Something outside the program stands in the way; the message says
            what and how to go on.
    """
    placement = devices.place_towers(config.num_gpus)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
        # Ampere and newer GPUs would round float32 to 10 bits in matrix products.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.debugging.set_log_device_placement(config.log_device_placement)
    if config.xla:
        devices.check_xla(placement)
    config = _resolved(config, placement)

    dataset = datasets.find(config.data, config.data_dir, config.data_url)
    images, labels = dataset.read("train")
    run_settings.check_batch(config, placement, len(images))
    variable_device = devices.variable_device(config.variable_device, placement)
    model = models.build(
        config.model,
        distortions.image_shape(config.distortions, images.shape[1:]),
        dataset.classes,
        precision=config.precision,
        seed=config.seed,
        device=variable_device,
    )
    prepare = functools.partial(distortions.prepare, kind=config.distortions)
    models.initialize(model, config.model, images, prepare)
    settings = run_settings.collect(config, placement, dataset, model)
    train_dir = run_directory.locate(config.train_dir)
    # Batch statistics and dropout make the number of towers part of the result.
    towers = ["towers"] if model.non_trainable_variables else []
    # A linear fall ends at --max_steps, so that is part of the result too.
    end = ["max_steps"] if config.schedule == "linear" else []
    with run_directory.hold(train_dir):
        note = run_directory.prepare(
            train_dir,
            settings,
            [*HYPERPARAMETERS, *towers, *end],
            fresh=config.fresh,
            command=sys.argv,
        )
        loop = _build_loop(config, placement, model, variable_device, len(images))
        resumed = loop.restore()
        warning = precision.warning(config.precision, placement.devices)
        first_lines = run_settings.first_lines(settings, len(images))
        for line in [first_lines, warning, note, *resumed]:
            if line:
                print(line, flush=True)
        if loop.step >= config.max_steps:
            print(
                f"Nothing to do: the run is at step {loop.step}, and --max_steps is "
                f"{config.max_steps}."
            )
        else:
            batches = _batches(config, placement, images, labels, loop.step)
            _run(loop, batches, settings)
    print(run_settings.last_lines(train_dir), flush=True)
    return loop.step


def _resolved(config: Config, placement: devices.Placement) -> Config:
    """Puts in what depends on the devices: the precision, the images per tower."""
    asked = "float16" if config.use_fp16 else config.precision
    resolved = precision.resolve(
        asked, placement.devices, deterministic=config.deterministic
    )
    batch_size = run_settings.batch_size(config, len(placement.devices))
    return dataclasses.replace(config, precision=resolved, batch_size=batch_size)


def _build_loop(
    config: Config,
    placement: devices.Placement,
    model: keras.Model,
    variable_device: str,
    examples_per_epoch: int,
) -> Loop:
    global_batch_size = config.batch_size * len(placement.devices)
    with tf.device(variable_device):  # The optimizer's scalars are variables too.
        optimizer = optimizers.build(
            config.optimizer,
            config.learning_rate,
            config.momentum,
            scale_loss=config.precision == "float16",
        )
    state = TrainState(model, optimizer, variable_device)
    learning_rate: schedule.StaircaseDecay | schedule.LinearDecay
    if config.schedule == "linear":
        learning_rate = schedule.LinearDecay(
            config.learning_rate, config.max_steps * global_batch_size
        )
    else:
        learning_rate = schedule.StaircaseDecay(
            config.learning_rate, config.epochs_per_decay, examples_per_epoch
        )
    tower = Tower(
        models.inference,
        functools.partial(models.loss, label_smoothing=config.label_smoothing),
        activations=models.with_activations(model),
        xla=config.xla,
    )
    average_decay = functools.partial(
        schedule.average_decay, config.moving_average_decay
    )
    towers = TowerBuilder(
        state,
        placement.devices,
        tower=tower,
        update=Update(learning_rate, average_decay),
    )
    train_dir = run_directory.locate(config.train_dir)
    progress = Progress(
        train_dir / run_directory.CHECKPOINTS,
        state,
        seed=config.seed,
        global_batch_size=global_batch_size,
        examples_per_epoch=examples_per_epoch,
        keep=retention.Rules(
            config.keep_checkpoints,
            best=config.keep_best,
            hours=config.keep_every_hours,
            evaluation=train_dir / run_directory.EVALUATION_EVENTS,
        ),
        go_on=config.on_save_error == "continue",
    )
    return Loop(config, train_dir, towers, progress)


def _batches(
    config: Config,
    placement: devices.Placement,
    images: np.ndarray,
    labels: np.ndarray,
    start_step: int,
) -> input_queues.PrefetchQueues:
    """Begins to make batches: on the towers' GPUs, or on the CPU into queues."""
    fits = images.nbytes <= device_input.MOST_BYTES
    if devices.distorts_on_towers(config.input_device, placement, fits=fits):
        made: Iterable = device_input.device_batches(
            images,
            labels,
            placement.devices,
            batch_size=config.batch_size,
            distortion=config.distortions,
            seed=config.seed,
            start_step=start_step,
        )
    else:
        made = input_queues.training_batches(
            images,
            labels,
            batch_size=config.batch_size,
            towers=len(placement.devices),
            distortion=config.distortions,
            seed=config.seed,
            start_step=start_step,
        )
    capacity = max(input_queues.QUEUE_CAPACITY, config.steps_per_call)
    return input_queues.PrefetchQueues(made, placement.devices, capacity)


def _run(
    loop: Loop,
    batches: input_queues.PrefetchQueues,
    settings: dict[str, Any],
) -> None:
    """Runs the steps that are left, and says how to go on if that fails."""
    try:
        with batches:
            loop.run(batches.get, settings, HYPERPARAMETERS)
    except KeyboardInterrupt:
        print(f"\nStopped. {loop.how_to_go_on()}", file=sys.stderr)
        raise
    except tf.errors.ResourceExhaustedError as error:
        raise UsageError(
            f"--batch_size {settings['batch_size']}: a step does not fit into the "
            f"memory of its device. Try half of it. {loop.how_to_go_on()}"
        ) from error
