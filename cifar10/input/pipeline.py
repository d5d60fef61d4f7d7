"""Shuffles and distorts training images, and fills one prefetch queue per tower.

The order of images is a pure function of (seed, epoch). The distortion of an image is a
function of (seed, step, position in the global batch). So the input can start at any
step, which makes resuming exact. The input is the same for any number of towers.

The stream of training images is one permutation of all images per epoch, without gaps
between epochs: a batch may hold the last images of one and the first of the next.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cifar10.config.fields import TRANSLATIONS
from cifar10.input.augmentation import Augmentation
from cifar10.input.dataset_base import Images
from cifar10.input.distortions import BatchSlice, distort, uniform

# Batches that wait in each tower's queue, as in the tutorial's prefetch queue.
QUEUE_CAPACITY = 2

# Rounds of the cipher that shuffles. With TensorFlow's default of 4, seed 0 leaves most
# images of a small set in place, and neighbours in a large set stay correlated. From 8
# rounds on, our tests find the order random. Rounds cost almost nothing.
_SHUFFLE_ROUNDS = 12

TowerBatch = tuple[tf.Tensor, tf.Tensor]


class Plan(NamedTuple):
    """Which images a slice of global batches contains, and how to distort them."""

    chosen: tf.Tensor  # int64 [steps * count], indices into the training set.
    seed: tf.Tensor  # int64 [steps, 2], for distorting whole global batches.
    flip: tf.Tensor | None = None  # bool, like `chosen`: to flip in `TRANSLATIONS`.


class BatchMaker(NamedTuple):
    """Makes batches of a training set, as a function of the step."""

    distortion: str  # One of `config.fields.DISTORTIONS`.
    seed: int  # The run's seed.
    image_size: int | None = None  # Distorted images are resized to it, if given.
    augmentation: Augmentation | None = None  # The recipe's, if any.

    def plan(
        self, step: tf.Tensor, batch_slice: BatchSlice, examples: int, count: int = 1
    ) -> Plan:
        """Chooses the images for a slice of the global batches of `count` steps.

        `step`, int64 [], counts the global batches before; `examples`, all images.
        """
        # Shuffling has no GPU kernel, so the whole plan is computed on the CPU.
        with tf.device("/cpu:0"):
            steps = step + tf.range(count, dtype=tf.int64)
            first = steps[:, None] * batch_slice.global_batch_size + batch_slice.first
            of_each = tf.range(batch_slice.batch_size, dtype=tf.int64)
            positions = tf.reshape(first + of_each, [-1])
            chosen = shuffled_indices(positions, examples, self.seed)
            seed = tf.stack([tf.fill([count], np.int64(self.seed)), steps], axis=1)
            if self.distortion not in TRANSLATIONS:
                return Plan(chosen, seed)
            # A random half of the images is flipped in even epochs, the other half in
            # odd epochs, so two epochs show every image both ways (airbench94).
            drawn = uniform([examples], tf.constant([self.seed, -1], tf.int64)) < 0.5
            odd_epoch = positions // examples % 2 == 1
            return Plan(chosen, seed, tf.gather(drawn, chosen) ^ odd_epoch)

    def make(
        self, images: tf.Tensor, labels: tf.Tensor, plan: Plan, batch_slice: BatchSlice
    ) -> TowerBatch:
        """Makes a batch of the images and labels that a plan has chosen.

        Args:
            images: Values 0 to 255, uint8 or float16 [count, height, width, channels].
            labels: int64 [count].
            plan: Result of the method `plan` for `batch_slice`.
            batch_slice: The images' slice of each global batch.

        Returns:
            Images, float32 [count, ...], and labels: float32 [count, classes] if the
            augmentation mixes images, else int64 [count].
        """
        images = distort(images, self.distortion, plan.seed, batch_slice, plan.flip)
        # Bilinear, without antialiasing, as in E1 by fulcrum (dev/LOG.md, 2026-11-23).
        if self.image_size:
            images = tf.image.resize(images, [self.image_size] * 2)
        if self.augmentation:
            return self.augmentation(images, labels, plan.seed, batch_slice)
        return images, labels


def training_batches(
    images: Images,
    labels: np.ndarray,
    maker: BatchMaker,
    *,
    batch_size: int,
    towers: int,
    start_step: int,
    worker: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """Builds the endless stream of distorted batches, split for the towers.

    Args:
        images: The training set, uint8 [count, height, width, channels]. Images on disk
            are read when a batch needs them.
        labels: Integers [count].
        maker: Chooses and distorts the images of each batch.
        batch_size: Images per tower and step.
        towers: Number of towers of this process.
        start_step: Step of the first batch.
        worker: Index and number of processes, which divide each global batch equally.

    Returns:
        A dataset of tuples, one (images, labels) per tower, made by `BatchMaker.make`.
    """
    index, processes = worker
    count = batch_size * towers
    batch_slice = BatchSlice(index * count, count, global_batch_size=processes * count)
    all_images = in_graph(images)
    with tf.device("/cpu:0"):
        all_labels = tf.constant(labels, tf.int64)

    @tf.autograph.experimental.do_not_convert  # It would delay the first step.
    def chosen_at(step: tf.Tensor) -> tuple[Plan, tf.Tensor, tf.Tensor]:
        plan = maker.plan(step, batch_slice, len(images))
        return plan, take(all_images, plan.chosen), tf.gather(all_labels, plan.chosen)

    @tf.autograph.experimental.do_not_convert
    def batches_of(
        plan: Plan, chosen: tf.Tensor, chosen_labels: tf.Tensor
    ) -> tuple[TowerBatch, ...]:
        batch = maker.make(chosen, chosen_labels, plan, batch_slice)
        return tuple(zip(*(tf.split(whole, towers) for whole in batch), strict=True))

    # Two stages, so that cores distort images while reads wait for the disk.
    return without_autotuning(
        tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
        .map(chosen_at, num_parallel_calls=2, deterministic=True)
        .prefetch(QUEUE_CAPACITY)
        .map(batches_of, num_parallel_calls=2, deterministic=True)
        .prefetch(QUEUE_CAPACITY)
    )


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without its autotuning thread, which has nothing to tune.

    The thread sleeps for up to a minute, and ending an iterator waits for the thread
    (TensorFlow 2.21, `Model::OptimizeLoop`).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def is_in_memory(images: Images) -> bool:
    """Returns whether images are a NumPy array in memory.

    A memory-mapped array is not in memory, although it is an instance of `ndarray`.
    """
    return type(images) is np.ndarray


def in_graph(images: Images) -> tf.Tensor | Images:
    """Converts images in memory to a tensor on the CPU; leaves others as they are."""
    if not is_in_memory(images):
        return images
    with tf.device("/cpu:0"):
        return tf.constant(images)


def take(images: tf.Tensor | Images, chosen: tf.Tensor) -> tf.Tensor:
    """Gathers images by their indices, int64 [count], within a traced function."""
    if tf.is_tensor(images):
        return tf.gather(images, chosen)
    # Stateful functions would run one after another in a --deterministic run.
    taken = tf.numpy_function(
        lambda numbers: images[numbers], [chosen], tf.uint8, stateful=False
    )
    return tf.ensure_shape(taken, [*chosen.shape, *images.shape[1:]])


def shuffled_indices(positions: tf.Tensor, examples: int, seed: int) -> tf.Tensor:
    """Returns the indices of the training images at positions of the shuffled stream.

    Both are int64 [count]. Positions count from the beginning of epoch 0.
    """
    epochs = positions // examples
    # The operation takes three numbers per seed; the third is not needed.
    seeds = tf.stack([epochs * 0 + seed, epochs, epochs * 0], axis=1)
    # The raw operation, because the wrapper in tf.random.experimental mistakes a matrix
    # of seeds, one per index, for a vector (TensorFlow 2.21).
    return tf.raw_ops.RandomIndexShuffle(
        rounds=_SHUFFLE_ROUNDS,
        index=positions % examples,
        seed=tf.cast(seeds, tf.int32),
        max_index=tf.constant(examples - 1, tf.int64),
    )


class PrefetchQueues(contextlib.AbstractContextManager):
    """One bounded queue per tower, filled in the background on the tower's device.

    Each item of `batches` holds one (images, labels) per tower. A queue holds up to
    `capacity` batches and the next one. At the end of a `with` block the thread stops.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[TowerBatch]],
        devices: Sequence[str],
        capacity: int = QUEUE_CAPACITY,
    ) -> None:
        self._batches = iter(batches)
        self._devices = tuple(devices)
        self._queues: list[deque[Future]] = [deque() for _ in devices]
        self._thread = ThreadPoolExecutor(1, "prefetch")
        for _ in range(capacity + 1):  # The last one is made while the others wait.
            self._request()

    def get(self) -> Sequence[TowerBatch]:
        """Waits for the next (images, labels) of every tower; passes on exceptions."""
        batches = [requested.popleft().result() for requested in self._queues]
        self._request()
        return batches

    def __exit__(self, *unused: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _request(self) -> None:
        """Requests one more batch for every tower, after those requested before."""
        made = self._thread.submit(next, self._batches)
        for tower, requested in enumerate(self._queues):
            requested.append(self._thread.submit(self._copy, made, tower))

    def _copy(self, made: Future, tower: int) -> TowerBatch:
        with tf.device(self._devices[tower]):
            images, labels = made.result()[tower]
            return tf.identity(images), tf.identity(labels)
