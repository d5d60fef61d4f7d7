"""What several rivals share: the constant batch and the clock."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cifar10.input.dataset_base import Dataset

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


def black_images(image_shape: tuple[int, int, int], count: int) -> Dataset:
    """Stands for the data set of a run whose batches do not come from one."""
    part = np.zeros((count, *image_shape), np.uint8), np.zeros(count, np.int32)
    return Dataset(
        name="black",
        directory=None,
        image_shape=image_shape,
        class_names=tuple(map(str, range(CLASSES))),
        description="black images",
        read=lambda split: part,  # noqa: ARG005
    )


def seconds_of(step: Callable[[], Any], untimed: int, timed: int) -> float:
    """Times steps that follow others which are not timed.

    The steps before make a rival forget that the others had their turns: batches
    prepared meanwhile are used up and caches are its own again.

    Args:
        step: Trains on one batch and returns its loss, a number once it is computed.
        untimed: Steps before the clock starts, at least one.
        timed: Steps on the clock, at least one.

    Raises:
        FloatingPointError: The last loss is not finite.
    """
    for _ in range(untimed):
        loss = step()
    float(loss)
    began = time.perf_counter()
    for _ in range(timed):
        loss = step()
    last = float(loss)
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


def load_variables(model: Any, values: dict[str, np.ndarray]) -> None:
    """Sets the trainable variables of a Keras model."""
    for variable in model.trainable_variables:
        variable.assign(values[variable.path])
