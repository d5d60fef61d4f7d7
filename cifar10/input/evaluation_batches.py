"""Makes batches for evaluation, which together contain every image of a split once."""

import numpy as np
import tensorflow as tf

from cifar10.input.dataset_base import Images
from cifar10.input.distortions import prepare
from cifar10.input.images_in_graph import in_graph, take
from cifar10.input.pipeline import without_autotuning


def evaluation_batches(
    images: Images,
    labels: np.ndarray,
    batch_size: int,
    distortion: str = "tutorial",
    count: int | None = None,
) -> tf.data.Dataset:
    """Makes batches of a split's images, in order and each image once.

    With a `count`, only the first `count` images are read. `images`, uint8 [total,
    height, width, channels], are prepared for a model trained with `distortion`.

    The last batch is padded with copies of the last image, so that all batches have the
    same shape. The mask is False for these copies.

    Returns:
        A dataset of batches (images, labels, mask): float32 [batch_size, height, width,
        channels], int32 [batch_size] and bool [batch_size].
    """
    count = len(images) if count is None else count
    all_images = in_graph(images)
    with tf.device("/cpu:0"):
        all_labels = tf.constant(labels)

    def batch_at(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        positions = first + tf.range(batch_size, dtype=tf.int64)
        chosen = tf.minimum(positions, count - 1)
        prepared = prepare(take(all_images, chosen), distortion)
        return prepared, tf.gather(all_labels, chosen), positions < count

    firsts = tf.data.Dataset.range(0, count, batch_size)
    return without_autotuning(firsts.map(batch_at, num_parallel_calls=2).prefetch(2))
