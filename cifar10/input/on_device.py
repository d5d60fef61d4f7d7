"""The data set in the memory of the towers' devices, distorted where it is used.

For data sets that fit beside the model: only the numbers of the images and a seed are
sent at each step. The batches are those of `input.training_batches`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from cifar10.input.pipeline import TowerBatch, distorted_batch

# A data set up to this size fits beside any model on any GPU of today; CIFAR-10 takes
# a seventh of it.
MOST_BYTES = 2**30


def device_batches(
    images: np.ndarray,
    labels: np.ndarray,
    devices: Sequence[str],
    *,
    batch_size: int,
    distortion: str,
    seed: int,
    start_step: int,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[list[TowerBatch]]:
    """Makes each tower's batches on its own device, endlessly.

    Give them to `input.PrefetchQueues`, which makes them in the background.

    Args:
        images: uint8 [count, height, width, 3], the training set.
        labels: int32 [count].
        devices: The device of each batch of a step, in order.
        batch_size: Images per tower and step.
        distortion: One of `distortions.CHOICES`.
        seed: Seed of the run.
        start_step: Steps to leave out at the beginning.
        shard: As in `input.training_batches`.

    Yields:
        One (images, labels) per tower, on the tower's device.
    """
    part, parts = shard
    size = batch_size * len(devices)
    stored = {}
    for device in devices:
        if device not in stored:
            with tf.device(device):
                stored[device] = tf.constant(images), tf.constant(labels)
    makers = [
        _maker(
            *stored[device],
            place=(part * size + number * batch_size, parts * size),
            batch_size=batch_size,
            distortion=distortion,
            seed=seed,
        )
        for number, device in enumerate(devices)
    ]
    for step in itertools.count(start_step):
        with tf.device("/cpu:0"):
            number = tf.constant(step, tf.int64)
        batches = []
        for device, make in zip(devices, makers, strict=True):
            with tf.device(device):
                batches.append(make(number))
        yield batches


def _maker(
    images: tf.Tensor,
    labels: tf.Tensor,
    *,
    place: tuple[int, int],
    batch_size: int,
    distortion: str,
    seed: int,
) -> Callable[[tf.Tensor], TowerBatch]:
    @tf.function(autograph=False)
    def make(step: tf.Tensor) -> TowerBatch:
        return distorted_batch(
            images, labels, distortion, seed, step, place, batch_size
        )

    return make
