"""Stores the training set on the towers' devices, and makes batches there.

The training set must fit beside the model. Each call sends only image indices and
random numbers to the devices. The batches are those of `pipeline.training_batches`.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from cifar10.input.dataset_base import Images
from cifar10.input.distortions import BatchSlice
from cifar10.input.pipeline import BatchMaker, TowerBatch, is_in_memory

# Fits beside any model on any current GPU; CIFAR-10 takes less than a third of it.
MOST_BYTES = 2**30


def stored_bytes(images: Images, labels: np.ndarray) -> int:
    """Returns the number of bytes that `store` takes on each device."""
    return math.prod(images.shape) * tf.float16.size + labels.size * tf.int64.size


def fits(images: Images, labels: np.ndarray, parts: int = 1) -> bool:
    """Returns whether a training set is in memory and small enough for every GPU.

    Each of the `parts` into which --split_gpu divides a GPU would hold a copy.
    """
    return is_in_memory(images) and stored_bytes(images, labels) <= MOST_BYTES // parts


def store(
    images: Images, labels: np.ndarray, devices: Iterable[str]
) -> dict[str, list[tf.Tensor]]:
    """Stores a training set, uint8 images and integer labels, once on each device.

    TensorFlow cannot gather uint8 on a GPU, and keeps int32 on the host, to be copied
    at every step. So images become float16 (exact from 0 to 255) and labels int64.

    Returns:
        On each: float16 images [count, height, width, channels], int64 labels [count].
    """
    with tf.device("/cpu:0"):
        converted = tf.cast(images, tf.float16), tf.cast(labels, tf.int64)
    stored = {}
    for device in set(devices):
        with tf.device(device):
            stored[device] = [tf.identity(part) for part in converted]
    return stored


def device_batches(
    images: Images,
    labels: np.ndarray,
    maker: BatchMaker,
    *,
    devices: Sequence[str],
    batch_size: int,
    start_step: int,
    worker: tuple[int, int] = (0, 1),
    counts: Iterable[int] = itertools.repeat(1),
    most: int = 1,
) -> Iterator[list[TowerBatch]]:
    """Yields one list for each call: a batch (images, labels) per tower.

    Each of `devices` makes the batches of one tower. The other arguments are as in
    `pipeline.training_batches`. `pipeline.PrefetchQueues` can make batches in advance.

    Calls are single steps without end, or of `counts` steps each, at most `most`. If
    `most` exceeds 1, images are [most, batch, ...] and labels [most, batch, ...], made
    at once because a GPU starts as many kernels for one batch as for a whole call.
    """
    index, processes = worker
    local = batch_size * len(devices)
    stored = store(images, labels, devices)

    def batch_on(device: str, batch_slice: BatchSlice, step: tf.Tensor) -> TowerBatch:
        plan = maker.plan(step, batch_slice, len(images), most)
        with tf.device(device):
            some, of_some = (tf.gather(one, plan.chosen) for one in stored[device])
            batch = maker.make(some, of_some, plan, batch_slice)
            if most == 1:
                return batch
            inputs, targets = (tf.reshape(x, [most, -1, *x.shape[1:]]) for x in batch)
            return inputs, targets

    functions = []
    for tower, device in enumerate(devices):
        first = index * local + tower * batch_size
        batch_slice = BatchSlice(first, batch_size, global_batch_size=processes * local)
        bound = functools.partial(batch_on, device, batch_slice)
        functions.append(tf.function(bound, autograph=False))
    step = start_step
    for count in counts:
        with tf.device("/cpu:0"):
            step_tensor = tf.constant(step, tf.int64)
        batches = []
        for device, function in zip(devices, functions, strict=True):
            with tf.device(device):
                batches.append(function(step_tensor))
        yield batches
        step += count
