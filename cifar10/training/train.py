"""Trains a model: puts data, model, towers and loop together.

The only module that knows all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from cifar10.config import options
from cifar10.config.config import Config
from cifar10.distributed import rendezvous, strategy as strategies
from cifar10.distributed.cluster import Cluster
from cifar10.errors import UsageError
from cifar10.input import datasets, pipeline
from cifar10.run_directory import layout, retention
from cifar10.towers import devices, precision
from cifar10.towers.builder import TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.training import assembly, settings as run_settings
from cifar10.training.loop import Loop
from cifar10.training.progress import Progress
from cifar10.training.signals import StopSignals

# What determines the result: a resumed run has to agree in it.
HYPERPARAMETERS = (*options.result_determining(Config), "global_batch_size")


# What the workers of a training need not have in common.
_OF_EACH_WORKER = {
    "data_description",
    "data_dir",
    "data_url",
    "devices",
    "fresh",
    "keep_best",
    "keep_checkpoints",
    "keep_every_hours",
    "local_workers",
    "log_device_placement",
    "max_restarts",
    "on_save_error",
    "recipe",
    "train_dir",
    "verbose",
    "worker_timeout",
}


def train(
    config: Config,
    stop: StopSignals | None = None,
    cluster: Cluster | None = None,
    follow: Callable[[TrainState, dict[str, Any]], Callable[[int], None]] | None = None,
) -> int:
    """Trains to `config.max_steps`, going on from the newest checkpoint.

    Args:
        config: The configuration.
        stop: Tells when to end before that.
        cluster: The machines that train together; None if this one trains alone.
        follow: Called once, with what the training updates and the content of
            `config.json`. What it returns is called before the first update and after
            each, with the step reached, as `Follower.attach(...).after_step` wants it.

    Returns:
        The step reached.

    Raises:
        StoppedError: A signal has ended the training, with a checkpoint.
        LostWorkerError: Another machine is gone.
        UsageError: Something outside the program stands in the way; the message says
            what and how to go on.
    """
    stop = stop or StopSignals()
    placement, strategy, replicas = _connect(config, stop, cluster)
    with rendezvous.sharing_refusals(cluster):
        config = _resolved(config, placement)
        with stop.at_once():  # A download takes long.
            dataset = datasets.find(config.data, config.data_dir, config.data_url)
        images, labels = dataset.read("train")
        run_settings.check_batch(config, placement, len(images))
        run_settings.check_warmup(config, placement, len(images))
        states = assembly.build_states(config, placement, replicas, dataset, images)
        settings = run_settings.collect(config, placement, dataset, states[0].model)
        towers, sectioned = assembly.build_towers(
            config, placement, states, strategy, cluster, images
        )
    is_chief = cluster is None or cluster.is_chief
    after_step = follow(states[0], settings) if follow else None
    loop = _build_loop(
        config, towers, len(images), stop, is_chief=is_chief, after_step=after_step
    )
    with contextlib.ExitStack() as held:
        if cluster:
            held.enter_context(rendezvous.reporting_lost_workers(cluster))
        told = _begin_together(held, loop, settings, states[0].model, cluster)
        if after_step:
            after_step(loop.step)
        if is_chief:
            first_lines = run_settings.first_lines(settings, len(images))
            warning = precision.warning(config.precision, placement.devices)
            told = [first_lines, sectioned, warning, *told]
        if loop.step >= config.max_steps and is_chief:
            told.append(
                f"Nothing to do: the run is at step {loop.step}, and --max_steps is "
                f"{config.max_steps}."
            )
        for line in told:
            if line:
                print(line, flush=True)
        if loop.step < config.max_steps:
            open_batches = functools.partial(
                assembly.open_batches, config, placement, cluster, images, labels
            )
            _run(loop, open_batches, settings)
    if is_chief:
        train_dir = layout.locate(config.train_dir)
        print(run_settings.last_lines(train_dir), flush=True)
    return loop.step


def _connect(
    config: Config, stop: StopSignals, cluster: Cluster | None
) -> tuple[devices.Placement, tf.distribute.Strategy | None, int]:
    """Places the towers and connects the machines, before anything else runs."""
    placement = devices.place_towers(config.num_gpus)
    placement = dataclasses.replace(
        placement,
        workers=len(cluster.workers) if cluster else 1,
        accumulate=config.accumulate,
    )
    tf.debugging.set_log_device_placement(config.log_device_placement)
    if config.xla:
        devices.check_xla(placement)
    # The others may not come for long.
    with stop.at_once(earlier=True) if cluster else contextlib.nullcontext():
        strategy, replicas = strategies.choose(
            config.variable_update, placement, cluster, config.worker_timeout
        )
    stop.take_back()
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
        # Ampere and newer GPUs would round float32 to 10 bits in matrix products.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    return placement, strategy, replicas


def _build_loop(
    config: Config,
    towers: TowerBuilder,
    examples_per_epoch: int,
    stop: StopSignals,
    *,
    is_chief: bool,
    after_step: Callable[[int], None] | None,
) -> Loop:
    train_dir = layout.locate(config.train_dir)
    progress = Progress(
        train_dir / layout.CHECKPOINTS,
        towers.state,
        seed=config.seed,
        global_batch_size=config.batch_size * towers.number,
        examples_per_epoch=examples_per_epoch,
        keep=retention.Rules(
            config.keep_checkpoints,
            best=config.keep_best,
            hours=config.keep_every_hours,
            evaluation=train_dir / layout.EVALUATION_EVENTS,
        ),
        go_on=config.on_save_error == "continue",
        is_chief=is_chief,
    )
    return Loop(
        config,
        train_dir,
        towers,
        progress,
        stop,
        is_chief=is_chief,
        after_step=after_step,
    )


def _begin_together(
    held: contextlib.ExitStack,
    loop: Loop,
    settings: dict[str, Any],
    model: keras.Model,
    cluster: Cluster | None,
) -> list[str | None]:
    """Goes on from the newest checkpoint on all machines; returns what to tell."""
    begin = functools.partial(_begin, held, loop, settings, model)
    told: list[str | None] | None
    if cluster is None:
        told = begin()
    else:
        alike = {
            name: value
            for name, value in settings.items()
            if name not in _OF_EACH_WORKER
        }
        patience = settings["worker_timeout"]
        rendezvous.compare(cluster, alike, patience)
        told = rendezvous.after_chief(cluster, begin, patience)
    loop.synchronize()
    if cluster and told is None:
        return [f"{cluster.this_worker}; {cluster.workers[0]} prints and writes."]
    return told or []


def _begin(
    held: contextlib.ExitStack, loop: Loop, settings: dict[str, Any], model: keras.Model
) -> list[str | None]:
    """Takes over the directory and goes on from its newest checkpoint."""
    # Batch statistics and dropout make the number of towers part of the result.
    towers = ["towers", "accumulate"] if model.non_trainable_variables else []
    # A linear fall ends at --max_steps, so that is part of the result too.
    end = ["max_steps"] if settings["schedule"] == "linear" else []
    train_dir = layout.locate(settings["train_dir"])
    held.enter_context(layout.hold(train_dir))
    note = layout.prepare(
        train_dir,
        settings,
        [*HYPERPARAMETERS, *towers, *end],
        unrecorded=dataclasses.asdict(Config()),
        fresh=settings["fresh"],
        command=sys.argv,
    )
    return [note, *loop.restore()]


def _resolved(config: Config, placement: devices.Placement) -> Config:
    """Puts in what depends on the devices: the precision, the images per tower."""
    asked = "float16" if config.use_fp16 else config.precision
    resolved = precision.resolve(
        asked, placement.devices, deterministic=config.deterministic
    )
    batch_size = run_settings.batch_size(config, placement)
    return dataclasses.replace(config, precision=resolved, batch_size=batch_size)


def _run(
    loop: Loop,
    open_batches: Callable[[int], pipeline.PrefetchQueues],
    settings: dict[str, Any],
) -> None:
    """Runs the steps that are left, and says how to go on if that fails."""
    try:
        loop.run(open_batches, settings, HYPERPARAMETERS)
    except tf.errors.ResourceExhaustedError as error:
        raise UsageError(
            f"--batch_size {settings['batch_size']}: a step does not fit into the "
            f"memory of its device. Try half of it. {loop.how_to_go_on()}"
        ) from error
