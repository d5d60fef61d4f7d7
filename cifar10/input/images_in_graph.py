"""Images within a graph: a tensor of those in memory, and reads of all others."""

import numpy as np
import tensorflow as tf

from cifar10.input.dataset_base import Images


def is_in_memory(images: Images) -> bool:
    """Returns whether images are an array in memory.

    NumPy's memory-mapped arrays are not, although their class derives from `ndarray`.
    """
    return type(images) is np.ndarray


def in_graph(images: Images) -> tf.Tensor | Images:
    """Makes a tensor on the CPU of images that are in memory; leaves others alone."""
    if not is_in_memory(images):
        return images
    with tf.device("/cpu:0"):
        return tf.constant(images)


def take(images: tf.Tensor | Images, chosen: tf.Tensor) -> tf.Tensor:
    """Takes the images of some numbers, int64 [count], within a traced function."""
    if tf.is_tensor(images):
        return tf.gather(images, chosen)
    # Not stateful: a --deterministic run would make one batch after another.
    taken = tf.numpy_function(
        lambda numbers: images[numbers], [chosen], tf.uint8, stateful=False
    )
    return tf.ensure_shape(taken, [*chosen.shape, *images.shape[1:]])
