"""Records in memory to one prefetch queue per tower.

The order of the images is a pure function of (seed, epoch), and their distortions are
one of (seed, step). So an input can start at any step without having run the earlier
ones, which makes resuming exact; and neither depends on the number of towers, because
the global batch is distorted before it is split.

The stream of training images is the permutation of epoch 0, then that of epoch 1, and
so on without a gap: a batch may hold the last images of one epoch and the first of the
next, and every epoch shows every image exactly once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import tensorflow as tf

from cifar10.input import distortions

# Batches that wait in each tower's queue, as in the tutorial's prefetch queue.
QUEUE_CAPACITY = 2

# Rounds of the cipher that shuffles. With TensorFlow's default of 4, seed 0 leaves most
# images of a small set in place, and in a large one neighbours stay correlated; from 8
# on no test of ours tells the order from a random one. More cost next to nothing.
_SHUFFLE_ROUNDS = 12

TowerBatch = tuple[tf.Tensor, tf.Tensor]


def shuffled_indices(
    positions: tf.Tensor, examples_per_epoch: int, seed: int
) -> tf.Tensor:
    """Tells which training images stand at some positions of the shuffled stream.

    Args:
        positions: int64 [count], places in the endless stream of all epochs.
        examples_per_epoch: Images in the training set.
        seed: Seed of the run.

    Returns:
        int64 [count], numbers of images. Within an epoch each image comes once.
    """
    epochs = positions // examples_per_epoch
    # The operation wants three numbers to each seed; the third has no meaning here.
    seeds = tf.stack(
        [tf.fill(epochs.shape, np.int64(seed)), epochs, epochs * 0], axis=1
    )
    # The raw operation, because the wrapper in tf.random.experimental mistakes a matrix
    # of seeds, one per index, for a vector (TensorFlow 2.21).
    return tf.raw_ops.RandomIndexShuffle(
        rounds=_SHUFFLE_ROUNDS,
        index=positions % examples_per_epoch,
        seed=tf.cast(seeds, tf.int32),
        max_index=tf.constant(examples_per_epoch - 1, tf.int64),
    )


def distorted_batch(
    images: tf.Tensor,
    labels: tf.Tensor,
    distortion: str,
    seed: int,
    step: tf.Tensor,
    place: tuple[int, int],
    count: int | None = None,
) -> TowerBatch:
    """Makes the global batch of a step, or a part of it.

    Args:
        images: uint8 [examples, height, width, 3], the training set.
        labels: int32 [examples].
        distortion: One of `distortions.CHOICES`.
        seed: Seed of the run.
        step: int64 [], updates before this one.
        place: The number of the part's first image within the global batch, and the
            size of the global batch.
        count: Images of the part; None for all that follow.

    Returns:
        Distorted images, float32 [count, ...], and labels, int32 [count].
    """
    first, global_batch_size = place
    count = count or global_batch_size - first
    examples = images.shape[0]
    # The order has no kernel for GPUs; its few numbers are computed on the CPU.
    with tf.device("/cpu:0"):
        positions = step * global_batch_size + first + tf.range(count, dtype=tf.int64)
        chosen = shuffled_indices(positions, examples, seed)
        odd_epoch = positions // examples % 2 == 1
        seeds = tf.stack([np.int64(seed), step])
    mirrored = None
    if distortion == "flip_translate":
        # Half of the images, drawn once, are mirrored in even epochs, the other half in
        # odd ones; so two epochs show both sides of every image (airbench94).
        drawn = tf.random.stateless_uniform([examples], [seed, -1], alg="philox") < 0.5
        mirrored = tf.gather(drawn, chosen) ^ odd_epoch
    distorted = distortions.distort(
        tf.gather(images, chosen),
        distortion,
        seed=seeds,
        mirrored=mirrored,
        place=place,
    )
    return distorted, tf.gather(labels, chosen)


def training_batches(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    batch_size: int,
    towers: int,
    distortion: str,
    seed: int,
    start_step: int,
    shard: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """Builds the endless stream of distorted batches, split for the towers.

    Args:
        images: uint8 [count, height, width, 3], the training set.
        labels: int32 [count].
        batch_size: Images per tower and step.
        towers: Number of towers of this process.
        distortion: One of `distortions.CHOICES`.
        seed: Seed of the run.
        start_step: Steps to leave out at the beginning.
        shard: Which part of every global batch is this process's, from 0, and how many
            such parts there are.

    Returns:
        A dataset of tuples, one (images, labels) per tower: float32
        [batch_size, ...], as `distortions.distort` makes them, and int32 [batch_size].
    """
    part, parts = shard
    size = batch_size * towers
    place = (part * size, parts * size)
    with tf.device("/cpu:0"):
        all_images = tf.constant(images)
        all_labels = tf.constant(labels)

    def batches_of_step(step: tf.Tensor) -> tuple[TowerBatch, ...]:
        distorted, chosen_labels = distorted_batch(
            all_images, all_labels, distortion, seed, step, place, size
        )
        return tuple(
            zip(
                tf.split(distorted, towers),
                tf.split(chosen_labels, towers),
                strict=True,
            )
        )

    options = tf.data.Options()
    options.deterministic = True
    return (
        tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
        .map(batches_of_step, num_parallel_calls=2, deterministic=True)
        .prefetch(QUEUE_CAPACITY)
        .with_options(options)
    )


class PrefetchQueues:
    """One bounded queue per tower, filled in the background on the tower's device.

    Use it as a context manager, or call `close`.

    Args:
        batches: A dataset or another iterable of tuples, one element per tower.
        devices: The towers' device names, in order.
        capacity: Batches that wait in each queue.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[TowerBatch]],
        devices: Sequence[str],
        capacity: int = QUEUE_CAPACITY,
    ) -> None:
        self._devices = tuple(devices)
        self._queues: list[queue.Queue] = [queue.Queue(capacity) for _ in self._devices]
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(batches,), name="prefetch", daemon=True
        )
        self._thread.start()

    def get(self) -> list[TowerBatch]:
        """Takes the next batch from every queue, waiting for those that are empty.

        Returns:
            One (images, labels) per tower, on the tower's device.

        Raises:
            Exception: Whatever stopped the filling thread.
        """
        batches = [tower_queue.get() for tower_queue in self._queues]
        for batch in batches:
            if isinstance(batch, BaseException):
                raise batch
        return batches

    def close(self) -> None:
        """Stops the filling thread and waits for its end."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _fill(self, batches: Iterable[Sequence[TowerBatch]]) -> None:
        try:
            for tower_batches in batches:
                for number, batch in enumerate(tower_batches):
                    with tf.device(self._devices[number]):
                        on_device = tuple(tf.identity(tensor) for tensor in batch)
                    if not self._put(number, on_device):
                        return
        except Exception as error:  # noqa: BLE001 - raised again in get().
            for number in range(len(self._queues)):
                self._put(number, error)

    def _put(self, number: int, item: object) -> bool:
        """Waits for a place in one queue; returns False if closed before that."""
        while not self._closed.is_set():
            try:
                self._queues[number].put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def evaluation_batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    distortion: str = "none",
) -> tf.data.Dataset:
    """Builds the batches of one pass over a set, in order, every image exactly once.

    The last batch is filled up with copies of the last image, so that all batches have
    one shape; its mask says which images count.

    Args:
        images: uint8 [count, height, width, 3].
        labels: int32 [count].
        batch_size: Images per batch.
        distortion: What the model was trained with, which tells how images are scaled.

    Returns:
        A dataset of (images, labels, mask): float32 [batch_size, ...], as
        `distortions.prepare` makes them; int32 [batch_size]; bool [batch_size].
    """
    count = len(images)
    with tf.device("/cpu:0"):
        all_images = tf.constant(images)
        all_labels = tf.constant(labels)

    def batch_at(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        positions = first + tf.range(batch_size, dtype=tf.int64)
        chosen = tf.minimum(positions, count - 1)
        prepared = distortions.prepare(tf.gather(all_images, chosen), distortion)
        return prepared, tf.gather(all_labels, chosen), positions < count

    firsts = tf.data.Dataset.range(0, count, batch_size)
    return firsts.map(batch_at, num_parallel_calls=2).prefetch(QUEUE_CAPACITY)
