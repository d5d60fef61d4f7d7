"""RandAugment: some operations in a row, drawn for each image, at one strength.

Cubuk et al., https://arxiv.org/abs/1909.13719, with the operations and strengths of
torchvision's `RandAugment`
(https://github.com/pytorch/vision/blob/v0.20.0/torchvision/transforms/autoaugment.py),
which are Pillow's and get stronger with the magnitude; in the paper's own code
posterizing and solarizing get weaker. As there, signs are drawn, strengths are not.

Not Keras's `RandAugment`: it draws one operation for all images of the batch that it is
given, and equalizes them by their common histogram.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "auto_contrast",
    "equalize",
)
# How far each operation goes, at the highest magnitude and in both directions.
_HIGHEST_MAGNITUDE = 30
_SHEAR = 0.3  # Of the other side.
_TRANSLATION = 150 / 331  # Of the image's side.
_DEGREES = 30.0
_ENHANCEMENT = 0.9  # Away from a factor of 1.
_LOST_BITS = 4  # Of 8.

# What comes in from beyond the edge, as in the code of AutoAugment
# (https://github.com/tensorflow/tpu/blob/master/models/official/efficientnet).
_FILL = 128.0
_VALUES = 256
# More than the rounding of a blend, where processors differ, and less than what a
# whole magnitude can leave to the next whole value, a hundredth.
_ROUNDING = 1 / 512
# Weights of red, green and blue in Pillow's grey, in parts of 65,536.
_LUMA = (19595.0, 38470.0, 7471.0)


def numbers(operations: int) -> int:
    """Returns how many random numbers an image takes."""
    return 2 * operations


def apply(
    images: tf.Tensor, drawn: Sequence[tf.Tensor], operations: int, magnitude: float
) -> tf.Tensor:
    """Changes each image by operations of its own, one after another.

    Args:
        images: 0 to 255 in any type [batch, height, width, channels].
        drawn: `numbers(operations)` tensors, float32 [batch] in [0, 1).
        operations: How many.
        magnitude: Their strength, 0 to 30.

    Returns:
        float32 [batch, height, width, channels], whole numbers 0 to 255.
    """
    images = tf.cast(images, tf.float32)
    for which, sign in zip(drawn[:operations], drawn[operations:], strict=True):
        chosen = tf.cast(which * len(OPERATIONS), tf.int64)
        images = change(images, chosen, sign < 0.5, magnitude)
    return images


def change(
    images: tf.Tensor, chosen: tf.Tensor, negative: tf.Tensor, magnitude: float
) -> tf.Tensor:
    """Changes each image by one operation.

    The batch goes through every kind of operation, most of which leave a given image
    unchanged: those of one kind are one computation with different numbers.

    Args:
        images: float32 [batch, height, width, channels], whole numbers 0 to 255.
        chosen: int64 [batch], indices in `OPERATIONS`.
        negative: bool [batch], the direction of those that have two.
        magnitude: 0 to 30.
    """
    strength = magnitude / _HIGHEST_MAGNITUDE
    images = _moved(images, chosen, negative, strength)
    images = _enhanced(images, chosen, negative, strength)
    return _replaced(images, chosen, strength)


def _is(name: str, chosen: tf.Tensor) -> tf.Tensor:
    """Returns which images' operation has a name, bool [batch, 1, 1, 1]."""
    return (chosen == OPERATIONS.index(name))[:, None, None, None]


def _by_operation(
    values: dict[str, tuple], otherwise: object, chosen: tf.Tensor, negative: tf.Tensor
) -> tf.Tensor:
    """Returns a value for each image: that of its operation in its direction.

    `values` has one for each direction, first the positive one; the result is float64.
    """
    table = [values.get(name, (otherwise, otherwise)) for name in OPERATIONS]
    flat = tf.constant([value for pair in table for value in pair], tf.float64)
    return tf.gather(flat, 2 * chosen + tf.cast(negative, tf.int64))


def _moved(
    images: tf.Tensor, chosen: tf.Tensor, negative: tf.Tensor, strength: float
) -> tf.Tensor:
    """Shears, translates and rotates; each pixel is the nearest one of the image."""
    _, height, width, channels = images.shape
    still = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    # In float64, so that no device rounds to another pixel; [batch, 6, 1, 1].
    motions = _by_operation(_motions(height, width, strength), still, chosen, negative)
    a, b, c, d, e, f = tf.unstack(motions[:, :, None, None], axis=1)
    x = tf.range(width, dtype=tf.float64)[None, None, :] + 0.5
    y = tf.range(height, dtype=tf.float64)[None, :, None] + 0.5
    column, row = tf.floor(a * x + b * y + c), tf.floor(d * x + e * y + f)
    is_inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    # What comes from outside the image is an extra pixel after its last one.
    pixels = tf.where(is_inside, row * width + column, float(height * width))
    flat = tf.reshape(images, [-1, height * width, channels])
    padded = tf.concat([flat, tf.fill([flat.shape[0], 1, channels], _FILL)], axis=1)
    return tf.gather(padded, tf.cast(pixels, tf.int64), batch_dims=1)


def _motions(height: int, width: int, strength: float) -> dict[str, tuple]:
    """Returns where a pixel comes from, in both directions, by operation.

    As in Pillow's `Image.transform`, six numbers a to f say that pixel x, y is from
    a x + b y + c, d x + e y + f.
    """
    shear = _SHEAR * strength
    across, down = (int(_TRANSLATION * side * strength) for side in (width, height))
    angle = -math.radians(_DEGREES * strength)  # Counter-clockwise.

    def rotated(angle: float) -> tuple:
        cos, sin = math.cos(angle), math.sin(angle)
        x, y = width / 2, height / 2
        return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y

    return {
        "shear_x": tuple((1.0, s, 0.0, 0.0, 1.0, 0.0) for s in (shear, -shear)),
        "shear_y": tuple((1.0, 0.0, 0.0, s, 1.0, 0.0) for s in (shear, -shear)),
        "translate_x": tuple((1.0, 0.0, t, 0.0, 1.0, 0.0) for t in (across, -across)),
        "translate_y": tuple((1.0, 0.0, 0.0, 0.0, 1.0, t) for t in (down, -down)),
        "rotate": (rotated(angle), rotated(-angle)),
    }


def _enhanced(
    images: tf.Tensor, chosen: tf.Tensor, negative: tf.Tensor, strength: float
) -> tf.Tensor:
    """Moves images away from a lesser form of themselves or towards it, as Pillow does.

    The lesser form is black for brightness, grey for colour, uniform grey for contrast,
    and smooth for sharpness.
    """
    grey = _grey(images)
    # In float64 the order of summation does not change it.
    mean = tf.reduce_mean(tf.cast(grey, tf.float64), axis=[1, 2], keepdims=True)
    lesser = tf.where(
        _is("contrast", chosen), tf.cast(tf.floor(mean + 0.5), tf.float32), 0
    )
    lesser = tf.where(_is("color", chosen), grey, lesser)
    lesser = tf.where(_is("sharpness", chosen), _smoothed(images), lesser)
    away = 1.0 + _ENHANCEMENT * strength, 1.0 - _ENHANCEMENT * strength
    names = ("brightness", "color", "contrast", "sharpness")
    factor = _by_operation(dict.fromkeys(names, away), 1.0, chosen, negative)
    factor = tf.cast(factor, tf.float32)[:, None, None, None]
    enhanced = tf.clip_by_value(lesser + factor * (images - lesser), 0.0, 255.0)
    return tf.floor(enhanced + _ROUNDING)


def _grey(images: tf.Tensor) -> tf.Tensor:
    """Returns Pillow's grey of images, [batch, height, width, 1]."""
    channels = images.shape[-1]
    if channels != len(_LUMA):
        return images[..., :1]
    weighted = tf.reduce_sum(images * _LUMA, axis=-1, keepdims=True)
    return tf.floor((weighted + 32768.0) / 65536.0)


def _smoothed(images: tf.Tensor) -> tf.Tensor:
    """Averages each pixel, five-fold, with its eight neighbours; edges stay."""
    # Thirteenths are never close to a half: how the sum is rounded does not matter.
    around = 9.0 * tf.nn.avg_pool2d(images, 3, 1, "VALID")
    inner = around + 4.0 * images[:, 1:-1, 1:-1]
    border = [[0, 0], [1, 1], [1, 1], [0, 0]]
    smooth = tf.pad(tf.floor(inner / 13.0 + 0.5), border)
    is_inner = tf.pad(tf.ones_like(inner[:1, :, :, :1]), border) > 0
    return tf.where(is_inner, smooth, images)


def _replaced(images: tf.Tensor, chosen: tf.Tensor, strength: float) -> tf.Tensor:
    """Replaces each value by another one, as posterizing, solarizing and others do."""
    batch, _, _, channels = images.shape
    planes = tf.range(batch * channels, dtype=tf.int64)
    planes = tf.reshape(planes * _VALUES, [batch, 1, 1, channels])
    places = planes + tf.cast(images, tf.int64)  # Each pixel's in all histograms.
    counts = tf.math.unsorted_segment_sum(
        tf.ones([math.prod(images.shape)]),
        tf.reshape(places, [-1]),
        batch * channels * _VALUES,
    )
    counts = tf.reshape(counts, [batch, channels, _VALUES])
    values = tf.range(_VALUES, dtype=tf.float32)
    step = 2.0 ** round(_LOST_BITS * strength)
    tables = {
        "posterize": tf.floor(values / step) * step,
        "solarize": tf.where(values < 255.0 * (1.0 - strength), values, 255.0 - values),
        "auto_contrast": _stretching(counts, values),
        "equalize": _equalizing(counts, values),
    }
    table = tf.broadcast_to(values, counts.shape)
    for name, replacement in tables.items():
        table = tf.where(_is(name, chosen)[..., 0], replacement, table)
    return tf.gather(tf.reshape(table, [-1]), places)


def _stretching(counts: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns a table that stretches the values of a channel to 0 to 255.

    `counts`, [batch, channels, 256], says how often each of the `values` occurs.
    """
    low, high = (
        reduce(tf.where(counts > 0, values, missing), axis=-1, keepdims=True)
        for reduce, missing in ((tf.reduce_min, 255.0), (tf.reduce_max, 0.0))
    )
    # Divided once: a quotient that is whole stays so.
    stretched = tf.floor((values - low) * 255.0 / tf.maximum(high - low, 1.0))
    return tf.where(high > low, stretched, values)


def _equalizing(counts: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns a table that makes a channel's histogram even; as `_stretching`."""
    darker = tf.cumsum(counts, axis=-1, exclusive=True)
    # All pixels but those of the lightest value that there is.
    below = tf.reduce_max(tf.where(counts > 0, darker, 0.0), axis=-1, keepdims=True)
    step = tf.floor(below / 255.0)
    lights = tf.floor((tf.floor(step / 2.0) + darker) / tf.maximum(step, 1.0))
    return tf.where(step > 0, tf.minimum(lights, 255.0), values)
