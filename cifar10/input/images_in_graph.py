"""Gathers images by index within a graph, from a tensor in memory or from disk."""

import numpy as np
import tensorflow as tf

from cifar10.input.dataset_base import Images


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
