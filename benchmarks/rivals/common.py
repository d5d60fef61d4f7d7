"""What several rivals share: the constant batch and the clock."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cifar10.input.dataset_base import Dataset
    from cifar10.input.pipeline import PrefetchQueues
    from cifar10.towers.devices import Placement

IMAGE_SHAPE = (24, 24, 3)
CLASSES = 10
LEARNING_RATE = 0.1  # The tutorial's.


def constant_batch(
    count: int, seed: int = 0, shape: tuple[int, int, int] = IMAGE_SHAPE
) -> tuple[np.ndarray, np.ndarray]:
    """Makes a batch of noise, with the mean and variance of standardized images.

    Args:
        count: Number of images.
        seed: The same seed makes the same batch.
        shape: Of an image.

    Returns:
        Images, float32 [count, *shape], and labels, int32 [count].
    """
    random = np.random.default_rng(seed)
    images = random.standard_normal((count, *shape), np.float32)
    return images, random.integers(CLASSES, size=count, dtype=np.int32)


def seconds_of(
    step: Callable[[], Any],
    untimed: int,
    timed: int,
    wait: Callable[[Any], float] = float,
) -> float:
    """Times steps that follow others which are not timed.

    The steps before make a rival forget that the others had their turns: batches
    prepared meanwhile are used up and caches are its own again.

    Args:
        step: Trains on one batch and returns its loss.
        untimed: Steps before the clock starts, at least one.
        timed: Steps on the clock, at least one.
        wait: Makes a number of what the last step returned, when the device is done.

    Raises:
        FloatingPointError: The last loss is not finite.
    """
    for _ in range(untimed):
        loss = step()
    wait(loss)
    began = time.perf_counter()
    for _ in range(timed):
        loss = step()
    last = wait(loss)
    elapsed = time.perf_counter() - began
    insist_on_finite(last)
    return elapsed


def insist_on_finite(loss: float) -> None:
    """Raises FloatingPointError for a loss that is not a number or infinite."""
    if not math.isfinite(loss):
        raise FloatingPointError(f"The training diverged: its loss is {loss}.")


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Keeps TensorFlow from shortening float32 to TensorFloat-32 on a GPU."""
    import tensorflow as tf

    shortens = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(shortens)


def tutorial_batches(
    dataset: Dataset, batch_size: int, placement: Placement
) -> PrefetchQueues:
    """Begins to make batches with the tutorial's distortions, as a training does.

    Args:
        dataset: What to read.
        batch_size: Images for each tower in a step.
        placement: Where the towers run.
    """
    from cifar10.input import on_device, pipeline
    from cifar10.towers import devices

    images, labels = dataset.read("train")
    source = images, labels, pipeline.BatchMaker("tutorial", seed=0)
    how = {"batch_size": batch_size, "start_step": 0}
    if devices.distorts_on_towers("auto", placement, fits=True):
        made = on_device.device_batches(*source, devices=placement.devices, **how)
    else:
        towers = len(placement.devices)
        made = pipeline.training_batches(*source, towers=towers, **how)
    return pipeline.PrefetchQueues(made, placement.devices)
