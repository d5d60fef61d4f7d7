"""What happens to an image before the model takes it: in words, and as operations."""

import math
from typing import Any

import tensorflow as tf

from cifar10.input import pipeline
from cifar10.input.distortions import channel_statistics


def describe(distortion: str, picture_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Returns what `pipeline.prepare` does, as JSON values for any language."""
    shape = pipeline.image_shape(distortion, picture_shape)
    *size, channels = picture_shape
    top, left = (size[0] - shape[0]) // 2, (size[1] - shape[1]) // 2
    standardization: dict[str, Any] = {
        "formula": "(value - mean) / max(deviation, least_deviation)",
        "mean": "of all values of one image, after the crop",
        "deviation": "of all values of one image, after the crop",
        "least_deviation": 1.0 / math.sqrt(math.prod(shape)),
    }
    if distortion in pipeline.WHOLE:
        means, deviations = channel_statistics(channels)
        standardization = {
            "formula": "(value - mean[channel]) / deviation[channel]",
            "mean": [255.0 * mean for mean in means],
            "deviation": [255.0 * part for part in deviations],
        }
    return {
        "pixels": "uint8 [height, width, channel], 0 to 255",
        "channels": ["red", "green", "blue"] if channels == 3 else ["brightness"],
        "size": size,
        "resize": "the largest centre of these proportions, bicubic, antialiased",
        "crop": {"top": top, "left": left, "height": shape[0], "width": shape[1]},
        "standardization": standardization,
    }


def fit(images: tf.Tensor, shape: tuple[int, int, int]) -> tf.Tensor:
    """Resizes uint8 images of any size to the data set's `shape`, as `predict` does.

    Few values differ from Pillow's, which rounds weights, and those by 1; by more only
    at harsh edges of tall images, of which its newer versions take the rows first.
    """
    sizes = tf.cast(tf.shape(images)[1:3], tf.float64)
    scale = tf.reduce_min(sizes / shape[:2])
    values = tf.cast(images, tf.float32)
    for axis, sums in ((1, "xw,bhwc->bhxc"), (0, "yh,bhxc->byxc")):
        values = tf.einsum(sums, _weights(shape[axis], sizes[axis], scale), values)
        values = tf.clip_by_value(tf.floor(values + 0.5), 0.0, 255.0)
    return tf.ensure_shape(values, (None, *shape))


def _weights(count: int, size: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the weights of `size` pixels in each of `count` pixels, `scale` apart."""
    places = tf.range(count, dtype=tf.float64) + (1 - count) / 2
    distances = tf.range(size) - (size - 1) / 2 - scale * places[:, None]
    # Keys's cubic kernel with a = -0.5, widened where several pixels become one.
    x = tf.abs(distances) / tf.maximum(scale, 1.0)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((2.5 - 0.5 * x) * x - 4.0) * x + 2.0
    weights = tf.where(x < 1.0, near, tf.where(x < 2.0, far, tf.zeros_like(x)))
    return tf.cast(weights / tf.reduce_sum(weights, axis=1, keepdims=True), tf.float32)
