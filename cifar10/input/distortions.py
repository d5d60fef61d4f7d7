"""Distorts batches of images for training, and prepares batches for evaluation.

Every distortion works on the whole batch at once, for images of any height, width and
number of channels. The random values for a global batch depend on its seed alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar10.config.fields import TRANSLATIONS, WHOLE
from cifar10.models.architecture import channel_statistics

# The tutorial's largest change of brightness, of 255, and its contrast factors.
BRIGHTNESS_DELTA = 63.0
CONTRAST_RANGE = (0.2, 1.8)

# The crops of GoogLeNet (https://arxiv.org/abs/1409.4842, section 6), as in
# torchvision: the fraction of the image's area, the ratio of width to height, and the
# number of attempts to draw a crop that fits in the image.
AREA_RANGE = (0.08, 1.0)
RATIO_RANGE = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10

Pair = tuple[tf.Tensor, tf.Tensor]  # One tensor for each axis, or for each end.


class BatchSlice(NamedTuple):
    """The part of every global batch that one process or one tower prepares."""

    first: int  # The index of the slice's first image in the global batch.
    batch_size: int
    global_batch_size: int


def distort(
    images: tf.Tensor,
    distortion: str,
    seed: tf.Tensor,
    batch_slice: BatchSlice,
    flip: tf.Tensor | None = None,
) -> tf.Tensor:
    """Distorts a batch for training, all images at once.

    This is about nine times as fast as mapping over single images (`dev/LOG.md`).

    Args:
        images: Values 0 to 255 in any type, [batch, height, width, channels].
        distortion: `tutorial` randomly crops, flips and changes brightness and
            contrast. `crop_flip` only crops and flips. Those in `TRANSLATIONS` flip the
            images marked in `flip`, and move all images by up to so many of 32 pixels.
            `random_resized_crop` enlarges a random crop to the size of the image, and
            flips. `none` only calls `prepare`.
        seed: int64 [2], or [steps, 2] for the batches of several steps in a row. The
            same seed gives the same distortions.
        batch_slice: Slice of the global batch to which the images belong.
        flip: bool [batch], the images to flip; only for `TRANSLATIONS`.

    Returns:
        float32 [batch, *image_shape(distortion, ...)], scaled as in `prepare`.
    """
    if distortion == "none":
        return prepare(images, distortion)
    several = 2 * CROP_ATTEMPTS if distortion == "random_resized_crop" else 2
    top, left, side, *others = draw(3 + several, seed, batch_slice)
    _, height, width, _ = images.shape
    if distortion in TRANSLATIONS:
        columns = _translated(left, width, distortion)
        columns = tf.where(tf.reshape(flip, [-1, 1]), width - 1 - columns, columns)
        rows = _translated(top, height, distortion)
        return normalize(_take_pixels(images, rows, columns))
    flip = side[:, None] < 0.5
    if distortion == "random_resized_crop":
        least, most = RATIO_RANGE
        # If no attempt fits, the crop is the largest one with an allowed ratio.
        largest = min(height, round(width / least)), min(width, round(height * most))
        sizes = random_sizes((height, width), others, AREA_RANGE, RATIO_RANGE, largest)
        return normalize(_resized_crops(images, sizes, top, left, flip))
    columns = _window(left, width)
    columns = tf.where(flip, columns[:, ::-1], columns)
    distorted = tf.cast(_take_pixels(images, _window(top, height), columns), tf.float32)
    if distortion == "tutorial":
        distorted = _change_brightness_and_contrast(distorted, *others)
    return tf.image.per_image_standardization(distorted)


def crop_size(side: int) -> int:
    """Returns the side of an image's crop: 24 if `side` is 32, as in the tutorial."""
    return max(1, side * 24 // 32)


def image_shape(distortion: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns the height, width and channels of a model's input images."""
    if distortion in WHOLE:
        return shape
    height, width, channels = shape
    return (crop_size(height), crop_size(width), channels)


def prepare(images: tf.Tensor, distortion: str) -> tf.Tensor:
    """Prepares a batch for evaluation, as a model trained with `distortion` expects it.

    Args:
        images: Values 0 to 255 in any type, [batch, height, width, channels].
        distortion: As in `--distortions`.

    Returns:
        float32 [batch, *image_shape(distortion, ...)]: in `WHOLE`, whole images, scaled
        by `normalize`; else central crops, each of zero mean and unit variance.
    """
    if distortion in WHOLE:
        return normalize(images)
    height, width, _ = image_shape(distortion, images.shape[1:])
    top = (images.shape[1] - height) // 2
    left = (images.shape[2] - width) // 2
    centre = images[:, top : top + height, left : left + width]
    return tf.image.per_image_standardization(tf.cast(centre, tf.float32))


def normalize(images: tf.Tensor) -> tf.Tensor:
    """Scales each channel by the channel's mean and deviation over CIFAR-10.

    All data sets are scaled alike, because other photographs have similar statistics.
    """
    means, deviations = channel_statistics(images.shape[-1])
    scale = [1.0 / (255.0 * deviation) for deviation in deviations]
    pairs = zip(means, deviations, strict=True)
    shift = [-mean / deviation for mean, deviation in pairs]
    return tf.cast(images, tf.float32) * scale + shift


def draw(count: int, seed: tf.Tensor, batch_slice: BatchSlice) -> list[tf.Tensor]:
    """Draws `count` random numbers in [0, 1) for each image in a slice of a batch.

    `seed` is int64 [2], or [steps, 2] for the batches of several steps in a row.
    Returns tensors, float32 [steps * batch]. No image's numbers depend on the slicing.
    """
    end = batch_slice.first + batch_slice.batch_size
    shape = [count, batch_slice.global_batch_size]
    with tf.device("/cpu:0"):  # A GPU would start a kernel for each step.
        seeds = tf.unstack(tf.reshape(seed, [-1, 2]))
        of_steps = [uniform(shape, one) for one in seeds]
        drawn = tf.stack(of_steps, axis=1)[:, :, batch_slice.first : end]
    return tf.unstack(tf.reshape(drawn, [count, -1]))


def uniform(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    """Draws float32 numbers in [0, 1) by Philox, the same on every device."""
    # Not `tf.random.stateless_uniform`: for the same bits it adds 50 operations.
    return tf.raw_ops.StatelessRandomUniform(shape=shape, seed=seed, dtype=tf.float32)


def _window(place: tf.Tensor, size: int) -> tf.Tensor:
    """Returns crops' pixel indices along an axis; `place` in [0, 1) picks the first."""
    taken = crop_size(size)
    first = tf.cast(place * (size - taken + 1), tf.int64)
    return first[:, None] + tf.range(taken, dtype=tf.int64)


def _translated(place: tf.Tensor, size: int, distortion: str) -> tf.Tensor:
    """Returns source indices, [batch, size]; 0.5 is no shift. Edges are reflected."""
    most = (size * TRANSLATIONS[distortion] + 16) // 32  # Rounded; given for 32.
    shift = tf.cast(place * (2 * most + 1), tf.int64) - most
    pixels = tf.abs(shift[:, None] + tf.range(size, dtype=tf.int64))
    return (size - 1) - tf.abs((size - 1) - pixels)


def _take_pixels(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Gathers the pixels at rows [batch, height] and columns [batch, width], int64."""
    batch, height, width, channels = images.shape
    # Not int32, which TensorFlow computes only on the CPU.
    first_pixel = tf.range(batch, dtype=tf.int64)[:, None, None] * (height * width)
    pixels = first_pixel + rows[:, :, None] * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def random_sizes(
    size: tuple[int, int],
    attempts: Sequence[tf.Tensor],
    area_range: tuple[float, float],
    ratio_range: tuple[float, float],
    otherwise: tuple[int, int],
) -> Pair:
    """Chooses the height and width of a random rectangle in each image.

    `attempts` are random numbers in [0, 1), first for `CROP_ATTEMPTS` areas, then for
    as many ratios of width to height. Returns heights and widths, float64 [batch], of
    the first attempt that fits in `size`, or `otherwise` if none fits.
    """
    height, width = size
    least, most = ratio_range
    sides = (tf.constant(side, tf.float64) for side in otherwise)
    heights, widths = (tf.fill(attempts[0].shape, side) for side in sides)
    areas, ratios = attempts[:CROP_ATTEMPTS], attempts[CROP_ATTEMPTS:]
    for area, shape in reversed([*zip(areas, ratios, strict=True)]):
        # In float64, so that all devices round to the same whole numbers.
        pixels = _between(*area_range, area) * (height * width)
        ratio = tf.exp(_between(math.log(least), math.log(most), shape))
        tall = tf.round(tf.sqrt(pixels / ratio))
        wide = tf.round(tf.sqrt(pixels * ratio))
        fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
        heights, widths = tf.where(fits, tall, heights), tf.where(fits, wide, widths)
    return heights, widths


def _between(low: float, high: float, uniform: tf.Tensor) -> tf.Tensor:
    """Maps numbers in [0, 1) to float64 numbers from `low` to `high`."""
    return low + (high - low) * tf.cast(uniform, tf.float64)


def _resized_crops(
    images: tf.Tensor, sizes: Pair, top: tf.Tensor, left: tf.Tensor, flip: tf.Tensor
) -> tf.Tensor:
    """Enlarges crops to the images' size, bilinearly, which needs no antialiasing."""
    _, height, width, _ = images.shape
    lines = tf.range(height, dtype=tf.float64)
    columns = tf.range(width, dtype=tf.float64)
    columns = tf.where(flip, width - 1.0 - columns, columns)
    (above, below), down = _neighbours(lines, top, sizes[0], height)
    (before, after), right = _neighbours(columns, left, sizes[1], width)

    def rows(numbers: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(images, numbers, batch_dims=1), tf.float32)

    upper = rows(above)
    tall = upper + (rows(below) - upper) * down[:, :, None, None]
    at_left = tf.gather(tall, before, axis=2, batch_dims=1)
    at_right = tf.gather(tall, after, axis=2, batch_dims=1)
    return at_left + (at_right - at_left) * right[:, None, :, None]


def _neighbours(
    pixels: tf.Tensor, place: tf.Tensor, taken: tf.Tensor, size: int
) -> tuple[Pair, tf.Tensor]:
    """Finds the two input pixels nearest to each output pixel along one axis.

    `place`, in [0, 1), selects the position of a crop of `taken` pixels. Returns the
    indices of the two pixels, int64 [batch, size], and the weight of the second.
    """
    first = tf.floor(tf.cast(place, tf.float64) * (size - taken + 1.0))
    centres = (pixels + 0.5) * (taken[:, None] / size) - 0.5
    centres = tf.clip_by_value(centres, 0.0, taken[:, None] - 1.0)
    lower = tf.floor(centres)
    upper = tf.minimum(lower + 1.0, taken[:, None] - 1.0)
    before, after = (tf.cast(first[:, None] + one, tf.int64) for one in (lower, upper))
    return (before, after), tf.cast(centres - lower, tf.float32)


def _change_brightness_and_contrast(
    images: tf.Tensor, brightness: tf.Tensor, contrast: tf.Tensor
) -> tf.Tensor:
    """Changes brightness and contrast as `tf.image` and the tutorial do, unclipped."""
    low, high = CONTRAST_RANGE
    shift = (2.0 * brightness - 1.0) * BRIGHTNESS_DELTA
    factor = low + (high - low) * contrast
    channel_mean = tf.reduce_mean(images, axis=[1, 2], keepdims=True)
    level = channel_mean + shift[:, None, None, None]
    return (images - channel_mean) * factor[:, None, None, None] + level
