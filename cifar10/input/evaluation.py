"""Images as evaluation and prediction see them: without distortions.

How training images are distorted decides how large images are and how they are scaled,
so every function takes the name of the distortion that the model is trained with.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

DISTORTIONS = ("tutorial", "crop_flip", "flip_translate", "none")

# Side of the tutorial's crop.
CROP_SIZE = 24

# Mean and deviation of each channel over CIFAR-10's training set, on the scale 0 to 1
# (airbench94).
_CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
_CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)


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
    return standardize(tf.cast(centre, tf.float32))


def standardize(images: tf.Tensor) -> tf.Tensor:
    """Gives each image zero mean and unit variance, as `per_image_standardization`.

    The deviation is taken to be at least 1 / sqrt(values per image), so that a uniform
    image does not divide by zero.
    """
    mean, variance = tf.nn.moments(images, axes=[1, 2, 3], keepdims=True)
    least = 1.0 / math.sqrt(math.prod(images.shape[1:]))
    return (images - mean) / tf.maximum(tf.sqrt(variance), least)


def normalize(images: tf.Tensor) -> tf.Tensor:
    """Gives each channel zero mean and unit variance over the data set."""
    scale = [1.0 / (255.0 * deviation) for deviation in _CHANNEL_DEVIATION]
    shift = [
        -mean / deviation
        for mean, deviation in zip(_CHANNEL_MEAN, _CHANNEL_DEVIATION, strict=True)
    ]
    return tf.cast(images, tf.float32) * scale + shift


def evaluation_batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    distortion: str = "none",
) -> tf.data.Dataset:
    """Builds the batches of one pass over a set, in order, every image exactly once.

    The last batch is filled up with copies of the last image, so that all batches have
    one shape; its mask marks the images that count.

    Args:
        images: uint8 [count, height, width, 3].
        labels: int32 [count].
        batch_size: Images per batch.
        distortion: The distortion the model was trained with, as for `prepare`.

    Returns:
        A dataset of (images, labels, mask): float32 [batch_size, ...], as `prepare`
        returns them; int32 [batch_size]; bool [batch_size].
    """
    count = len(images)
    with tf.device("/cpu:0"):
        all_images = tf.constant(images)
        all_labels = tf.constant(labels)

    def batch_at(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        positions = first + tf.range(batch_size, dtype=tf.int64)
        chosen = tf.minimum(positions, count - 1)
        prepared = prepare(tf.gather(all_images, chosen), distortion)
        return prepared, tf.gather(all_labels, chosen), positions < count

    firsts = tf.data.Dataset.range(0, count, batch_size)
    return firsts.map(batch_at, num_parallel_calls=2).prefetch(2)
