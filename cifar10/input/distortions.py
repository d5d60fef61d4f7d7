"""Image distortions, a whole batch at a time, without state.

Every random value is drawn once per image from a seed that the caller gives, so the
same seed distorts a batch in the same way whoever asks. Working on the batch at once is
about nine times as fast as mapping over single images (`docs/lab-notes.md`).
"""

from __future__ import annotations

import math

import tensorflow as tf

CHOICES = ("tutorial", "crop_flip", "flip_translate", "none")

# The tutorial's constants: side of the crop, largest change of brightness on the scale
# 0 to 255, and range of the contrast factor.
CROP_SIZE = 24
BRIGHTNESS_DELTA = 63.0
CONTRAST_RANGE = (0.2, 1.8)

# airbench94's: largest translation in pixels; mean and deviation of each channel over
# CIFAR-10's training set, on the scale 0 to 1.
TRANSLATION = 2
_CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
_CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)


# TensorFlow computes with int32 on the CPU only, even for tensors of a GPU.
_INDEX = tf.int64


def image_shape(kind: str, original: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns height, width and channels of the images that a kind makes."""
    if kind == "flip_translate":
        return original
    return (CROP_SIZE, CROP_SIZE, original[-1])


def distort(
    images: tf.Tensor,
    kind: str,
    seed: tf.Tensor,
    *,
    mirrored: tf.Tensor | None = None,
    place: tuple[int, int] | None = None,
) -> tf.Tensor:
    """Distorts a batch for training.

    Args:
        images: uint8 [batch, height, width, 3].
        kind: `tutorial` crops, flips and changes brightness and contrast at random;
            `crop_flip` does the first two; `flip_translate` mirrors the images that
            `mirrored` names and moves all by up to `TRANSLATION` pixels; `none` is what
            evaluation sees.
        seed: int64 [2]. The same seed gives the same distortions.
        mirrored: bool [batch], for `flip_translate`.
        place: Where the images are part of a larger batch, the number of the first and
            the size of the larger batch; they are then distorted as there.

    Returns:
        float32 [batch, *image_shape(kind)], as `prepare` scales them.
    """
    if kind == "none":
        return prepare(images, kind)
    batch = images.shape[0]
    first, whole = place or (0, batch)
    uniform = tf.random.stateless_uniform([5, whole], seed, alg="philox")
    uniform = uniform[:, first : first + batch]
    if kind == "flip_translate":
        return _normalize(_translate(images, uniform[0], uniform[1], mirrored))
    distorted = tf.cast(
        _random_crop_and_flip(images, *tf.unstack(uniform[:3])), "float32"
    )
    if kind == "tutorial":
        distorted = _random_brightness_and_contrast(distorted, uniform[3], uniform[4])
    return standardize(distorted)


def prepare(images: tf.Tensor, kind: str) -> tf.Tensor:
    """Prepares a batch for evaluation, as a model trained with a kind expects it.

    Args:
        images: uint8 [batch, height, width, 3].
        kind: One of `CHOICES`.

    Returns:
        float32 [batch, *image_shape(kind)]: for `flip_translate` the whole image, each
        channel with zero mean and unit variance over the data set; else its centre,
        with zero mean and unit variance per image.
    """
    return _normalize(images) if kind == "flip_translate" else centre_crop(images)


def centre_crop(images: tf.Tensor) -> tf.Tensor:
    """Prepares a batch for evaluation: its centre, standardized.

    Args:
        images: uint8 [batch, height, width, 3].

    Returns:
        float32 [batch, CROP_SIZE, CROP_SIZE, 3], zero mean and unit variance per image.
    """
    top = (images.shape[1] - CROP_SIZE) // 2
    left = (images.shape[2] - CROP_SIZE) // 2
    centre = images[:, top : top + CROP_SIZE, left : left + CROP_SIZE]
    return standardize(tf.cast(centre, tf.float32))


def standardize(images: tf.Tensor) -> tf.Tensor:
    """Gives each image zero mean and unit variance, as `per_image_standardization`.

    Args:
        images: float32 [batch, height, width, 3].

    Returns:
        float32 of the same shape. The deviation is taken to be at least
        1 / sqrt(values per image), so that a uniform image does not divide by zero.
    """
    mean, variance = tf.nn.moments(images, axes=[1, 2, 3], keepdims=True)
    least = 1.0 / math.sqrt(math.prod(images.shape[1:]))
    return (images - mean) / tf.maximum(tf.sqrt(variance), least)


def _normalize(images: tf.Tensor) -> tf.Tensor:
    """Gives each channel zero mean and unit variance over the data set."""
    scale = [1.0 / (255.0 * deviation) for deviation in _CHANNEL_DEVIATION]
    shift = [
        -mean / deviation
        for mean, deviation in zip(_CHANNEL_MEAN, _CHANNEL_DEVIATION, strict=True)
    ]
    return tf.cast(images, tf.float32) * scale + shift


def _translate(
    images: tf.Tensor, down: tf.Tensor, right: tf.Tensor, mirrored: tf.Tensor
) -> tf.Tensor:
    """Moves and mirrors in one gather; the edge is filled with its reflection.

    The second and third are uniform in [0, 1) [batch], the last one bool [batch].
    """
    batch, height, width, channels = images.shape

    def reflected(uniform: tf.Tensor, size: int) -> tf.Tensor:
        shift = tf.cast(uniform * (2 * TRANSLATION + 1), _INDEX) - TRANSLATION
        places = tf.abs(shift[:, None] + tf.range(size, dtype=_INDEX))  # [batch, size]
        return (size - 1) - tf.abs((size - 1) - places)

    rows = reflected(down, height)
    columns = reflected(right, width)
    columns = tf.where(mirrored[:, None], width - 1 - columns, columns)
    first_pixel = tf.range(batch, dtype=_INDEX)[:, None, None] * (height * width)
    pixels = first_pixel + rows[:, :, None] * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def _random_crop_and_flip(
    images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, flip: tf.Tensor
) -> tf.Tensor:
    """Crops and mirrors in one gather; the last three are uniform in [0, 1) [batch]."""
    batch, height, width, channels = images.shape
    window = tf.range(CROP_SIZE, dtype=_INDEX)
    top = tf.cast(top * (height - CROP_SIZE + 1), _INDEX)[:, None]
    left = tf.cast(left * (width - CROP_SIZE + 1), _INDEX)[:, None]
    rows = top + window  # [batch, CROP_SIZE]
    columns = left + tf.where(flip[:, None] < 0.5, CROP_SIZE - 1 - window, window)
    first_pixel = tf.range(batch, dtype=_INDEX)[:, None, None] * (height * width)
    pixels = first_pixel + rows[:, :, None] * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def _random_brightness_and_contrast(
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
