"""Training images to one prefetch queue per tower.

The order of the images is a pure function of (seed, epoch), and their distortions are a
function of (seed, step, place in the global batch). So an input can start at any step,
which makes resuming exact, and neither depends on the number of towers.

The stream of training images is the permutation of epoch 0, then that of epoch 1, and
so on without a gap: a batch may hold the last images of one epoch and the first of the
next, and every epoch shows every image exactly once.

`datasets.py` finds the images, in memory or on a disk; `training_batches` orders them,
has `distortions.py` distort them, and splits them; `PrefetchQueues` holds the results
ready on the towers' devices.
"""

import dataclasses
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import tensorflow as tf

from cifar10.input.dataset_base import Images
from cifar10.input.distortions import (  # noqa: F401 - callers find all of them here.
    TRANSLATIONS,
    WHOLE,
    BatchSlice,
    distort,
    image_shape,
    prepare,
    uniform,
)
from cifar10.input.images_in_graph import in_graph, take

if TYPE_CHECKING:
    from cifar10.input.augmentation import Augmentation

# Batches that wait in each tower's queue, as in the tutorial's prefetch queue.
QUEUE_CAPACITY = 2

# Rounds of the cipher that shuffles. With TensorFlow's default of 4, seed 0 leaves most
# images of a small set in place, and in a large one neighbours stay correlated; from 8
# on no test of ours distinguishes the order from a random one. They cost next to none.
_SHUFFLE_ROUNDS = 12

TowerBatch = tuple[tf.Tensor, tf.Tensor]


class Plan(NamedTuple):
    """The images of a slice of one global batch, in a few numbers per image."""

    chosen: tf.Tensor  # int64 [count], which images of the training set.
    seed: tf.Tensor  # int64 [2], of the distortions of the whole global batch.
    flip: tf.Tensor | None = None  # bool [count], for `TRANSLATIONS`.


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Makes batches of a training set, as a function of the step.

    Attributes:
        distortion: One of `config.fields.DISTORTIONS`.
        seed: Seed of the run.
        image_size: Side to which distorted images are reduced; None keeps their size.
        augmentation: The recipe's augmentation; None without one.
    """

    distortion: str
    seed: int
    image_size: int | None = None
    augmentation: "Augmentation | None" = None

    def plan(self, step: tf.Tensor, batch_slice: BatchSlice, examples: int) -> Plan:
        """Chooses the images of a slice of a step's global batch.

        `step`, int64 [], is the number of batches before this one, and `examples` the
        size of the training set.
        """
        # The order has no kernel for GPUs; all these numbers are computed on the CPU.
        with tf.device("/cpu:0"):
            positions = step * batch_slice.global_batch_size + batch_slice.first
            positions += tf.range(batch_slice.batch_size, dtype=tf.int64)
            chosen = shuffled_indices(positions, examples, self.seed)
            seed = tf.stack([np.int64(self.seed), step])
            if self.distortion not in TRANSLATIONS:
                return Plan(chosen, seed)
            # Half of the images, drawn once, are flipped in even epochs, the other half
            # in odd ones; so two epochs show both sides of every image (airbench94).
            of_images = tf.constant([self.seed, -1], tf.int64)
            drawn = uniform([examples], of_images) < 0.5
            odd_epoch = positions // examples % 2 == 1
            return Plan(chosen, seed, tf.gather(drawn, chosen) ^ odd_epoch)

    def make(
        self, images: tf.Tensor, labels: tf.Tensor, plan: Plan, batch_slice: BatchSlice
    ) -> TowerBatch:
        """Makes a batch of the images that a plan has chosen, and their labels.

        Args:
            images: uint8, or float16 with the same values [count, height, width,
                channels].
            labels: int64 [count].
            plan: From `plan`, for the same slice.
            batch_slice: Slice of the global batch to which the images belong.

        Returns:
            Images, float32 [count, ...], and labels, int64 [count], or, where images
            are mixed, float32 [count, classes].
        """
        if self.augmentation:
            images = self.augmentation.before_distortion(images, plan, batch_slice)
        images = distort(images, self.distortion, plan.seed, batch_slice, plan.flip)
        # The whole image, bilinearly and not smoothed before (fulcrum's E1).
        if self.image_size:
            images = tf.image.resize(images, [self.image_size] * 2)
        if self.augmentation:
            return self.augmentation.after_distortion(images, labels, plan, batch_slice)
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
        images: uint8 [count, height, width, channels], the training set. Of images that
            are not in memory, only those in the batches are read.
        labels: Integers [count].
        maker: Makes batches of images.
        batch_size: Images per tower and step.
        towers: Number of towers of this process.
        start_step: Step of the first batch.
        worker: This process's index and the number of processes, each of which makes an
            equal slice of every global batch.

    Returns:
        A dataset of tuples with one (images, labels) per tower, as returned by
        `BatchMaker.make`.
    """
    index, processes = worker
    count = batch_size * towers
    batch_slice = BatchSlice(index * count, count, global_batch_size=processes * count)
    all_images = in_graph(images)
    with tf.device("/cpu:0"):
        all_labels = tf.constant(labels, tf.int64)

    def chosen_at(step: tf.Tensor) -> tuple[Plan, tf.Tensor, tf.Tensor]:
        plan = maker.plan(step, batch_slice, len(images))
        return plan, take(all_images, plan.chosen), tf.gather(all_labels, plan.chosen)

    def batches_of(
        plan: Plan, chosen: tf.Tensor, chosen_labels: tf.Tensor
    ) -> tuple[TowerBatch, ...]:
        batch = maker.make(chosen, chosen_labels, plan, batch_slice)
        return tuple(zip(*(tf.split(whole, towers) for whole in batch), strict=True))

    # Two stages, so that no core that could distort images waits for a disk.
    return without_autotuning(
        tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
        .map(chosen_at, num_parallel_calls=2, deterministic=True)
        .prefetch(QUEUE_CAPACITY)
        .map(batches_of, num_parallel_calls=2, deterministic=True)
        .prefetch(QUEUE_CAPACITY)
    )


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without its autotuning thread, which has nothing to tune.

    That thread sleeps for up to a minute, and the end of an iterator waits for it
    (TensorFlow 2.21, `Model::OptimizeLoop`). All numbers here are fixed.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def shuffled_indices(
    positions: tf.Tensor, examples_per_epoch: int, seed: int
) -> tf.Tensor:
    """Returns the training images at some positions of the shuffled stream.

    Both are int64 [count]; positions count from the beginning of epoch 0. Within an
    epoch each image comes once.
    """
    epochs = positions // examples_per_epoch
    # The operation takes three numbers per seed; the third has no meaning here.
    seeds = tf.stack([epochs * 0 + seed, epochs, epochs * 0], axis=1)
    # The raw operation, because the wrapper in tf.random.experimental mistakes a matrix
    # of seeds, one per index, for a vector (TensorFlow 2.21).
    return tf.raw_ops.RandomIndexShuffle(
        rounds=_SHUFFLE_ROUNDS,
        index=positions % examples_per_epoch,
        seed=tf.cast(seeds, tf.int32),
        max_index=tf.constant(examples_per_epoch - 1, tf.int64),
    )


class PrefetchQueues:
    """One bounded queue per tower, filled in the background on the tower's device.

    `batches` yields tuples with one element per tower, and `capacity` of them wait in
    each queue. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[TowerBatch]],
        devices: Sequence[str],
        capacity: int = QUEUE_CAPACITY,
    ) -> None:
        self._devices = tuple(devices)
        self._queues: list[queue.Queue] = [queue.Queue(capacity) for _ in devices]
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(batches,), name="prefetch", daemon=True
        )
        self._thread.start()

    def get(self) -> Sequence[TowerBatch]:
        """Waits for the next (images, labels) of every tower, and returns them.

        Raises the exception that stopped the filling thread, if there was one.
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
                for tower, batch in enumerate(tower_batches):
                    with tf.device(self._devices[tower]):
                        on_device = tuple(tf.identity(tensor) for tensor in batch)
                    self._put(tower, on_device)
                if self._closed.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - raised again in get().
            for tower in range(len(self._queues)):
                self._put(tower, error)

    def _put(self, tower: int, item: object) -> None:
        """Waits for room in one queue; drops the item if closed before that."""
        while not self._closed.is_set():
            try:
                self._queues[tower].put(item, timeout=0.1)
            except queue.Full:
                continue
            return
