"""Trains a few steps whose learning rate rises, and keeps only their losses."""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import datasets, on_device
from cifar10.tools.find_rate.losses import Average, Losses
from cifar10.towers import devices
from cifar10.towers.update import Update
from cifar10.training import assembly, class_weights, settings


def find(
    requested: Config,
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 300,
    announce: Callable[[str], None] = lambda _: None,
) -> Losses:
    """Trains at rates that rise from step to step until the loss explodes.

    Args:
        requested: The training: its data, model, towers and update. Its schedule, its
            length and its directory do not matter.
        lowest: Rate of the first step.
        highest: Rate of the last one.
        steps: At most so many; all rates are one factor apart.
        announce: Called with a text before what takes long.

    Raises:
        UsageError: The training is not possible, or does not fit into the memory.
    """
    placement = devices.place_towers(requested.num_gpus, requested.split_gpu)
    config = settings.resolve(requested, placement)
    models.find(config.model)
    dataset = datasets.find_for(vars(config))
    images, labels = dataset.read("train")
    settings.check_epoch(config, len(images))
    on_device.check(config.input_device, images)
    announce(f"Towers: {placement.description}")
    announce(f"Data:   {len(images):,} training images of {dataset.description}")
    factor = (highest / lowest) ** (1.0 / (steps - 1))

    def rate_after(examples: tf.Tensor) -> tf.Tensor:
        step = tf.cast(examples, tf.float64) / config.global_batch_size
        return lowest * tf.pow(tf.constant(factor, tf.float64), step)

    towers, _ = assembly.build_towers(
        config,
        placement,
        assembly.build_states(config, placement, 1, dataset, images),
        None,
        None,
        images,
        class_weights=class_weights.of_training_set(
            config.class_weights, labels, dataset.class_names
        ),
        update=Update(rate_after, None, clip_norm=config.clip_norm),
    )
    towers.freeze(config.stage(0).frozen)
    announce(
        f"Training up to {steps:,} steps of {config.global_batch_size:,} images ..."
    )
    average, explodes = Average(), False
    losses: list[float] = []
    batches = assembly.open_batches(config, placement, None, images, labels, 0, 0)
    try:
        with batches as queues:
            while len(losses) < steps and not explodes:
                # Beside a large weight decay the fall of the total would not be seen.
                loss = float(towers.step(queues.get()).metrics["cross_entropy"])
                explodes = average.explodes(loss)
                losses.append(loss)
    except tf.errors.ResourceExhaustedError as error:
        raise UsageError(
            f"--batch_size {config.batch_size}: a step does not fit into the memory of "
            "its device. Try half of it."
        ) from error
    finite = [loss for loss in losses if math.isfinite(loss)]
    rates = lowest * factor ** np.arange(len(finite))
    return Losses(rates, np.array(finite), explodes)
