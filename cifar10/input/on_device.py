"""The data set in the memory of the towers' devices, distorted where it is used.

For data sets that fit beside the model: only the indices of the images and a seed are
sent at each step. The batches are those of `pipeline.training_batches`.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

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
    image_size: int | None = None,
) -> Iterator[list[TowerBatch]]:
    """Yields one (images, labels) per tower, made on the tower's device, endlessly.

    `devices` holds the device of each tower, in order; the other arguments are those of
    `pipeline.training_batches`. `pipeline.PrefetchQueues` makes the batches ahead.
    """
    index, processes = shard
    local = batch_size * len(devices)
    stored = {}
    for device in set(devices):
        with tf.device(device):
            stored[device] = tf.constant(images), tf.constant(labels)

    makers = [
        tf.function(
            functools.partial(
                distorted_batch,
                *stored[device],
                distortion=distortion,
                seed=seed,
                first=index * local + tower * batch_size,
                count=batch_size,
                global_batch_size=processes * local,
                image_size=image_size,
            ),
            autograph=False,
        )
        for tower, device in enumerate(devices)
    ]
    for step in itertools.count(start_step):
        with tf.device("/cpu:0"):
            step_tensor = tf.constant(step, tf.int64)
        batches = []
        for device, make in zip(devices, makers, strict=True):
            with tf.device(device):
                batches.append(make(step_tensor))
        yield batches
