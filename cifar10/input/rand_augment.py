"""RandAugment: applies randomly drawn operations to each image, at a fixed strength.

The method is from Cubuk et al., https://arxiv.org/abs/1909.13719. The operations and
strengths are those of torchvision's `RandAugment`
(https://github.com/pytorch/vision/blob/v0.20.0/torchvision/transforms/autoaugment.py),
which follow Pillow and get stronger with the magnitude, whereas in the paper's code
posterizing and solarizing get weaker. The sign of each strength is drawn at random.

Keras's `RandAugment` is not used: it draws one operation for all images of a batch, and
equalizes all of them by one common histogram.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

# The strength of each operation at the highest magnitude, in both directions.
_HIGHEST_MAGNITUDE = 30
_SHEAR = 0.3  # Pixels per pixel of the other axis.
_TRANSLATION = 150 / 331  # Fraction of the image's side.
_DEGREES = 30.0
_ENHANCEMENT = 0.9  # Difference of the factor from 1.
_LOST_BITS = 4  # Of 8.

# The grey of pixels from outside the image, as in the code of AutoAugment
# (https://github.com/tensorflow/tpu/blob/master/models/official/efficientnet).
_FILL = 128.0
_VALUES = 256
# Added before a blend is rounded down, because processors differ by less than this. At
# whole magnitudes, a fractional blend is at least 0.01 below the next whole value.
_ROUNDING = 1 / 512
# Weights of red, green and blue in Pillow's grey, in units of 1 / 65,536.
_LUMA = (19595.0, 38470.0, 7471.0)


def apply(
    images: tf.Tensor, drawn: Sequence[tf.Tensor], operations: int, magnitude: float
) -> tf.Tensor:
    """Applies randomly drawn operations to each image, one after another.

    Images are [batch, height, width, channels], 0 to 255 in any type, and become whole
    numbers in float32. `drawn` has two random tensors per operation, float32 [batch] in
    [0, 1). The magnitude is 0 to 30.
    """
    images = tf.cast(images, tf.float32)
    for which, sign in zip(drawn[:operations], drawn[operations:], strict=True):
        chosen = tf.cast(which * len(OPERATIONS), tf.int64)
        images = change(images, chosen, sign < 0.5, magnitude)
    return images


def change(
    images: tf.Tensor, chosen: tf.Tensor, negative: tf.Tensor, magnitude: float
) -> tf.Tensor:
    """Applies one operation to each image.

    On a CPU, the batch is partitioned by operation and direction, so that each image
    goes through one operation only. On a GPU, the sizes of the partitions would have to
    be copied to the host, so every image goes through all operations.

    Args:
        images: float32 [batch, height, width, channels], whole numbers 0 to 255.
        chosen: int64 [batch], indices in `OPERATIONS`.
        negative: bool [batch], the direction, for operations that have two.
        magnitude: Strength of the operations, 0 to 30.
    """
    strength = magnitude / _HIGHEST_MAGNITUDE
    operations = [
        (operation, signed)
        for operation in _CHANGES.values()
        for signed in (strength, -strength)
    ]
    kinds = 2 * chosen + tf.cast(negative, tf.int64)  # GPUs compute no int32.
    if "GPU" in tf.identity(images).device:
        changed = images
        for kind, (operation, signed) in enumerate(operations):
            is_kind = (kinds == kind)[:, None, None, None]
            changed = tf.where(is_kind, operation(images, signed), changed)
        return changed
    places = tf.dynamic_partition(
        tf.range(images.shape[0]), tf.cast(kinds, tf.int32), len(operations)
    )
    parts = [
        operation(tf.gather(images, place), signed)
        for (operation, signed), place in zip(operations, places, strict=True)
    ]
    return tf.ensure_shape(tf.dynamic_stitch(places, parts), images.shape)


def _count(images: tf.Tensor) -> int | tf.Tensor:
    """Returns the number of images, if possible as an int: GPUs need a constant."""
    return tf.shape(images)[0] if images.shape[0] is None else images.shape[0]


def _move(
    images: tf.Tensor, a: float, b: float, c: float, d: float, e: float, f: float
) -> tf.Tensor:
    """Fills each pixel (x, y) from the source pixel (a x + b y + c, d x + e y + f)."""
    _, height, width, channels = images.shape
    # Rounded as in Pillow, in NumPy's float64, which rounds alike for every device.
    y, x = np.ogrid[0.5:height, 0.5:width]
    column, row = np.floor(a * x + b * y + c), np.floor(d * x + e * y + f)
    is_inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    # All pixels outside the image are one grey pixel after the image's last pixel.
    pixels = np.where(is_inside, row * width + column, height * width)
    flat = tf.reshape(images, [-1, height * width, channels])
    padded = tf.concat([flat, tf.fill([_count(images), 1, channels], _FILL)], axis=1)
    moved = tf.gather(padded, pixels.reshape(-1).astype(np.int64), axis=1)
    return tf.reshape(moved, [-1, height, width, channels])


def _rotate(images: tf.Tensor, strength: float) -> tf.Tensor:
    """Rotates counter-clockwise about the centre."""
    angle = -math.radians(_DEGREES * strength)
    cos, sin = math.cos(angle), math.sin(angle)
    y, x = images.shape[1] / 2, images.shape[2] / 2
    return _move(
        images, cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y
    )


def _enhance(
    images: tf.Tensor, lesser: tf.Tensor | float, strength: float
) -> tf.Tensor:
    """Returns images with a scaled difference from `lesser`, such as a grey copy."""
    factor = 1.0 + _ENHANCEMENT * strength
    enhanced = tf.clip_by_value(lesser + factor * (images - lesser), 0.0, 255.0)
    return tf.floor(enhanced + _ROUNDING)


def _grey(images: tf.Tensor) -> tf.Tensor:
    """Converts images to grey as Pillow does, [batch, height, width, 1]."""
    channels = images.shape[-1]
    if channels != len(_LUMA):
        return images[..., :1]
    weighted = tf.reduce_sum(images * _LUMA, axis=-1, keepdims=True)
    return tf.floor((weighted + 32768.0) / 65536.0)


def _even_grey(images: tf.Tensor) -> tf.Tensor:
    """Returns the mean grey of each image, [batch, 1, 1, 1]."""
    # In float64, the order of summation does not change the result.
    grey = tf.cast(_grey(images), tf.float64)
    mean = tf.reduce_mean(grey, axis=[1, 2], keepdims=True)
    return tf.cast(tf.floor(mean + 0.5), tf.float32)


def _smoothed(images: tf.Tensor) -> tf.Tensor:
    """Averages each inner pixel (weight 5) with its eight neighbours (weight 1)."""
    # A multiple of 1/13 is never close to a half, so errors of the sum do not matter.
    around = 9.0 * tf.nn.avg_pool2d(images, 3, 1, "VALID")
    inner = around + 4.0 * images[:, 1:-1, 1:-1]
    border = [[0, 0], [1, 1], [1, 1], [0, 0]]
    smooth = tf.pad(tf.floor(inner / 13.0 + 0.5), border)
    is_inner = tf.pad(tf.ones_like(inner[:1, :, :, :1]), border) > 0
    return tf.where(is_inner, smooth, images)


def _posterize(images: tf.Tensor, strength: float) -> tf.Tensor:
    step = 2.0 ** round(_LOST_BITS * abs(strength))
    return tf.floor(images / step) * step


def _auto_contrast(images: tf.Tensor, strength: float) -> tf.Tensor:
    """Stretches the values of each channel to the full range, 0 to 255."""
    del strength
    low = tf.reduce_min(images, axis=[1, 2], keepdims=True)
    high = tf.reduce_max(images, axis=[1, 2], keepdims=True)
    # Only one division, so that whole quotients stay whole.
    stretched = tf.floor((images - low) * 255.0 / tf.maximum(high - low, 1.0))
    return tf.where(high > low, stretched, images)


def _equalize(images: tf.Tensor, strength: float) -> tf.Tensor:
    """Equalizes the histogram of each channel."""
    del strength
    count = _count(images) * images.shape[-1]
    planes = tf.range(tf.cast(count, tf.int64)) * _VALUES
    # The index of each pixel's value in the histograms of all planes.
    places = tf.reshape(planes, [-1, 1, 1, images.shape[-1]]) + tf.cast(
        images, tf.int64
    )
    flat = tf.reshape(places, [-1])
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(flat, tf.float32), flat, count * _VALUES
    )
    counts = tf.reshape(counts, [-1, _VALUES])
    darker = tf.cumsum(counts, axis=-1, exclusive=True)
    # The number of pixels that are darker than the lightest pixel.
    below = tf.reduce_max(tf.where(counts > 0, darker, 0.0), axis=-1, keepdims=True)
    step = tf.floor(below / 255.0)
    lights = tf.floor((tf.floor(step / 2.0) + darker) / tf.maximum(step, 1.0))
    values = tf.range(_VALUES, dtype=tf.float32)
    table = tf.where(step > 0, tf.minimum(lights, 255.0), values)
    return tf.gather(tf.reshape(table, [-1]), places)


# Each operation takes images, float32 as in `change`, and a strength. Operations with
# two directions go in the second direction if the strength is negative.
_CHANGES: dict[str, Callable[[tf.Tensor, float], tf.Tensor]] = {
    "identity": lambda images, strength: images,  # noqa: ARG005
    "shear_x": lambda images, strength: _move(
        images, 1.0, _SHEAR * strength, 0.0, 0.0, 1.0, 0.0
    ),
    "shear_y": lambda images, strength: _move(
        images, 1.0, 0.0, 0.0, _SHEAR * strength, 1.0, 0.0
    ),
    "translate_x": lambda images, strength: _move(
        images, 1.0, 0.0, int(_TRANSLATION * images.shape[2] * strength), 0.0, 1.0, 0.0
    ),
    "translate_y": lambda images, strength: _move(
        images, 1.0, 0.0, 0.0, 0.0, 1.0, int(_TRANSLATION * images.shape[1] * strength)
    ),
    "rotate": _rotate,
    # The `lesser` forms are Pillow's: black, grey, uniform grey, and a smooth image.
    "brightness": lambda images, strength: _enhance(images, 0.0, strength),
    "color": lambda images, strength: _enhance(images, _grey(images), strength),
    "contrast": lambda images, strength: _enhance(images, _even_grey(images), strength),
    "sharpness": lambda images, strength: _enhance(images, _smoothed(images), strength),
    "posterize": _posterize,
    "solarize": lambda images, strength: tf.where(
        images < 255.0 * (1.0 - abs(strength)), images, 255.0 - images
    ),
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
}
OPERATIONS = tuple(_CHANGES)
