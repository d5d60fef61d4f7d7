"""Training images in memory to one prefetch queue per tower.

The order of the images is a pure function of (seed, epoch), and their distortions are
one of (seed, step, place in the global batch). So an input can start at any step, which
makes resuming exact, and neither depends on the number of towers.

The stream of training images is the permutation of epoch 0, then that of epoch 1, and
so on without a gap: a batch may hold the last images of one epoch and the first of the
next, and every epoch shows every image exactly once.

`records.py` reads the images; `training_batches` orders, distorts and splits them;
`PrefetchQueues` holds the results ready on the towers' devices.
"""

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import tensorflow as tf

DISTORTIONS = ("tutorial", "crop_flip", "flip_translate", "none")

# Side of the tutorial's crop.
CROP_SIZE = 24

# Mean and deviation of each channel over CIFAR-10's training set, on the scale 0 to 1
# (airbench94).
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)

# Batches that wait in each tower's queue, as in the tutorial's prefetch queue.
QUEUE_CAPACITY = 2

# The tutorial's largest change of brightness, on the scale 0 to 255, and range of the
# contrast factor.
BRIGHTNESS_DELTA = 63.0
CONTRAST_RANGE = (0.2, 1.8)

TRANSLATION = 2  # airbench94's largest, in pixels.

# Rounds of the cipher that shuffles. With TensorFlow's default of 4, seed 0 leaves most
# images of a small set in place, and in a large one neighbours stay correlated; from 8
# on no test of ours distinguishes the order from a random one. They cost next to none.
_SHUFFLE_ROUNDS = 12

TowerBatch = tuple[tf.Tensor, tf.Tensor]


class Part(NamedTuple):
    """The part of every global batch that a process or a tower makes."""

    first: int  # Its first image, within the global batch.
    batch_size: int
    global_batch_size: int


class Plan(NamedTuple):
    """What a part of one global batch shows, in a few numbers per image."""

    chosen: tf.Tensor  # int64 [count], which images of the training set.
    seed: tf.Tensor  # int64 [2], of the distortions of the whole global batch.
    flip: tf.Tensor | None = None  # bool [count], for `flip_translate`.


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
    image_size: int | None = None,
) -> tf.data.Dataset:
    """Builds the endless stream of distorted batches, split for the towers.

    Args:
        images: uint8 [count, height, width, 3], the training set.
        labels: Integers [count].
        batch_size: Images per tower and step.
        towers: Number of towers of this process.
        distortion: One of `DISTORTIONS`.
        seed: Seed of the run.
        start_step: Step of the first batch.
        shard: This process's index and the number of processes, each of which makes an
            equal part of every global batch.
        image_size: Side to which distorted images are reduced; None: not at all.

    Returns:
        A dataset of tuples, one (images, labels) per tower: float32
        [batch_size, ...], as `distort` returns them, and int64 [batch_size].
    """
    index, processes = shard
    count = batch_size * towers
    part = Part(index * count, count, global_batch_size=processes * count)
    with tf.device("/cpu:0"):
        all_images = tf.constant(images)
        all_labels = tf.constant(labels, tf.int64)

    def batches_of_step(step: tf.Tensor) -> tuple[TowerBatch, ...]:
        plan = plan_batch(step, part, len(images), distortion, seed)
        batch = distorted_batch(
            all_images, all_labels, plan, part, distortion, image_size
        )
        return tuple(zip(*(tf.split(whole, towers) for whole in batch), strict=True))

    return (
        tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
        .map(batches_of_step, num_parallel_calls=2, deterministic=True)
        .prefetch(QUEUE_CAPACITY)
    )


def plan_batch(
    step: tf.Tensor, part: Part, examples: int, distortion: str, seed: int
) -> Plan:
    """Chooses the images of a part of a step's global batch.

    `step`, int64 [], is the number of batches before this one, and `examples` the size
    of the training set.
    """
    first, count, global_batch_size = part
    # The order has no kernel for GPUs; all these numbers are computed on the CPU.
    with tf.device("/cpu:0"):
        positions = step * global_batch_size + first + tf.range(count, dtype=tf.int64)
        chosen = shuffled_indices(positions, examples, seed)
        step_seed = tf.stack([np.int64(seed), step])
        if distortion != "flip_translate":
            return Plan(chosen, step_seed)
        # Half of the images, drawn once, are flipped in even epochs, the other half in
        # odd ones; so two epochs show both sides of every image (airbench94).
        drawn = _uniform([examples], tf.constant([seed, -1], tf.int64)) < 0.5
        odd_epoch = positions // examples % 2 == 1
        return Plan(chosen, step_seed, tf.gather(drawn, chosen) ^ odd_epoch)


def distorted_batch(
    images: tf.Tensor,
    labels: tf.Tensor,
    plan: Plan,
    part: Part,
    distortion: str,
    image_size: int | None = None,
) -> TowerBatch:
    """Makes the part of a global batch that `plan_batch` has planned.

    `images`, in any type that holds 0 to 255, and `labels` are the whole training set.

    Returns:
        Distorted images, float32 [count, ...], and labels, int64 [count].
    """
    distorted = distort(
        tf.gather(images, plan.chosen),
        distortion,
        plan.seed,
        flip=plan.flip,
        first=part.first,
        global_batch_size=part.global_batch_size,
    )
    if (
        image_size
    ):  # The whole image, bilinearly and not smoothed before (fulcrum's E1).
        distorted = tf.image.resize(distorted, [image_size, image_size])
    return distorted, tf.gather(labels, plan.chosen)


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


def distort(
    images: tf.Tensor,
    distortion: str,
    seed: tf.Tensor,
    *,
    flip: tf.Tensor | None = None,
    first: int = 0,
    global_batch_size: int | None = None,
) -> tf.Tensor:
    """Distorts a batch for training, all images at once.

    Random values are drawn for the whole global batch, so a part of it is distorted as
    within the whole. Working on the batch at once is about nine times as fast as
    mapping over single images (`docs/lab-notes.md`).

    Args:
        images: 0 to 255 in any type [batch, height, width, 3].
        distortion: `tutorial` crops, flips and changes brightness and contrast at
            random; `crop_flip` does the first two; `flip_translate` flips the images
            marked in `flip` and moves all by up to `TRANSLATION` pixels; `none` is
            `prepare`.
        seed: int64 [2]. The same seed gives the same distortions.
        flip: bool [batch], for `flip_translate`.
        first: Index of the first image within the global batch.
        global_batch_size: Images in the global batch; None if `images` is all of it.

    Returns:
        float32 [batch, *image_shape(distortion)], scaled as by `prepare`.
    """
    if distortion == "none":
        return prepare(images, distortion)
    batch = images.shape[0]
    # Five random values per image, [batch] each, in [0, 1).
    shape = [5, global_batch_size or batch]
    vertical, horizontal, side, brightness, contrast = tf.unstack(
        _uniform(shape, seed)[:, first : first + batch]
    )
    if distortion == "flip_translate":
        return normalize(_flip_and_translate(images, vertical, horizontal, flip))
    crops = _crop_and_flip(images, vertical, horizontal, side < 0.5)
    distorted = tf.cast(crops, tf.float32)
    if distortion == "tutorial":
        distorted = _change_brightness_and_contrast(distorted, brightness, contrast)
    return tf.image.per_image_standardization(distorted)


def image_shape(
    distortion: str, original: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Returns height, width and channels of the images that a model is given."""
    if distortion == "flip_translate":
        return original
    return (CROP_SIZE, CROP_SIZE, original[-1])


def prepare(images: tf.Tensor, distortion: str) -> tf.Tensor:
    """Prepares a batch for evaluation, as a model trained with `distortion` expects it.

    Args:
        images: uint8 [batch, height, width, 3].
        distortion: One of `DISTORTIONS`.

    Returns:
        float32 [batch, *image_shape(distortion)]: for `flip_translate` the whole image,
        each channel with zero mean and unit variance over the data set; else its
        centre, with zero mean and unit variance per image.
    """
    if distortion == "flip_translate":
        return normalize(images)
    top = (images.shape[1] - CROP_SIZE) // 2
    left = (images.shape[2] - CROP_SIZE) // 2
    centre = images[:, top : top + CROP_SIZE, left : left + CROP_SIZE]
    return tf.image.per_image_standardization(tf.cast(centre, tf.float32))


def normalize(images: tf.Tensor) -> tf.Tensor:
    """Gives each channel zero mean and unit variance over the data set."""
    scale = [1.0 / (255.0 * deviation) for deviation in CHANNEL_DEVIATION]
    shift = [
        -mean / deviation
        for mean, deviation in zip(CHANNEL_MEAN, CHANNEL_DEVIATION, strict=True)
    ]
    return tf.cast(images, tf.float32) * scale + shift


def _uniform(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    """Draws float32 numbers in [0, 1), the same ones with XLA as without.

    They are those of `tf.random.stateless_uniform`, whose kernels take the lower bits
    of a random integer as the fraction, where XLA takes the upper ones.
    """
    bits = tf.random.stateless_uniform(
        shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    return tf.bitcast((bits & 0x007FFFFF) | 0x3F800000, tf.float32) - 1.0


def _crop_and_flip(
    images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, flip: tf.Tensor
) -> tf.Tensor:
    """Crops every image at a random place; `top` and `left` are in [0, 1)."""
    _, height, width, _ = images.shape
    window = tf.range(CROP_SIZE, dtype=tf.int64)
    top = tf.cast(top * (height - CROP_SIZE + 1), tf.int64)[:, None]
    left = tf.cast(left * (width - CROP_SIZE + 1), tf.int64)[:, None]
    columns = left + tf.where(flip[:, None], CROP_SIZE - 1 - window, window)
    return _take_pixels(images, top + window, columns)


def _flip_and_translate(
    images: tf.Tensor, down: tf.Tensor, right: tf.Tensor, flip: tf.Tensor
) -> tf.Tensor:
    """Moves every image, `down` and `right` in [0, 1), and reflects it at its edges."""
    _, height, width, _ = images.shape

    def shifted(uniform: tf.Tensor, size: int) -> tf.Tensor:
        shift = tf.cast(uniform * (2 * TRANSLATION + 1), tf.int64) - TRANSLATION
        # [batch, size], reflected at the first pixel and then at the last.
        pixels = tf.abs(shift[:, None] + tf.range(size, dtype=tf.int64))
        return (size - 1) - tf.abs((size - 1) - pixels)

    columns = shifted(right, width)
    columns = tf.where(flip[:, None], width - 1 - columns, columns)
    return _take_pixels(images, shifted(down, height), columns)


def _take_pixels(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Takes the pixels at rows [batch, height] and columns [batch, width], int64."""
    batch, height, width, channels = images.shape
    # Not int32, with which TensorFlow computes on the CPU only.
    first_pixel = tf.range(batch, dtype=tf.int64)[:, None, None] * (height * width)
    pixels = first_pixel + rows[:, :, None] * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def _change_brightness_and_contrast(
    images: tf.Tensor, brightness: tf.Tensor, contrast: tf.Tensor
) -> tf.Tensor:
    """Shifts all values, then stretches each channel about its mean, as tf.image does.

    Values are not clipped to 0 to 255: in the tutorial they are floats by then.
    """
    low, high = CONTRAST_RANGE
    shift = (2.0 * brightness - 1.0) * BRIGHTNESS_DELTA
    factor = low + (high - low) * contrast
    channel_mean = tf.reduce_mean(images, axis=[1, 2], keepdims=True)
    level = channel_mean + shift[:, None, None, None]
    return (images - channel_mean) * factor[:, None, None, None] + level


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
        """Waits for every tower's next (images, labels).

        It raises what stopped the filling thread, if anything did.
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
