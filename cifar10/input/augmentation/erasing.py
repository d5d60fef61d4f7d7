"""Random erasing: a rectangle of an image becomes noise. Cutout: a square becomes grey.

Zhong et al., https://arxiv.org/abs/1708.04896. Not Keras's `RandomErasing`: it draws
height and width apart, and noise that is clipped to black and white. DeVries and
Taylor, https://arxiv.org/abs/1708.04552.
"""

from collections.abc import Sequence

import tensorflow as tf

from cifar10.input.distortions import CROP_ATTEMPTS, random_sizes

# The part of the image's area and the ratio of width to height, of the paper's
# section 5.1. Ratios are drawn evenly by their logarithm, as in torchvision, so that
# tall and wide ones are alike.
AREA_RANGE = (0.02, 0.4)
RATIO_RANGE = (0.3, 1 / 0.3)

# Random numbers per image: whether, where, the noise's shift, and the sizes to try.
NUMBERS = 4 + 2 * CROP_ATTEMPTS


def erase(
    images: tf.Tensor, drawn: Sequence[tf.Tensor], noise: tf.Tensor, probability: float
) -> tf.Tensor:
    """Fills a rectangle of some of the images with noise.

    The noise is uniform, like the paper's over all values of a pixel, with the zero
    mean and unit variance of scaled images.

    Args:
        images: float32 [batch, height, width, channels], scaled.
        drawn: `NUMBERS` tensors, float32 [batch] in [0, 1).
        noise: float32 [height, width, channels] in [0, 1). Each image has it shifted by
            another number, so that its values are as random, and a tower draws none for
            the images of others.
        probability: How often an image is erased.

    Returns:
        float32 [batch, height, width, channels].
    """
    chance, vertical, horizontal, shift, *attempts = drawn
    areas, ratios = attempts[:CROP_ATTEMPTS], attempts[CROP_ATTEMPTS:]
    _, height, width, _ = images.shape
    nothing = (0, 0)  # Erased where no size fits.
    sizes = random_sizes(
        (height, width), areas, ratios, AREA_RANGE, RATIO_RANGE, otherwise=nothing
    )
    rows = _within(vertical, sizes[0], height)
    columns = _within(horizontal, sizes[1], width)
    erased = (chance < probability)[:, None, None] & rows[:, :, None]
    erased &= columns[:, None, :]
    moved = tf.math.floormod(noise + shift[:, None, None, None], 1.0)
    return tf.where(erased[..., None], (moved - 0.5) * 12**0.5, images)


def cut_out(
    images: tf.Tensor, vertical: tf.Tensor, horizontal: tf.Tensor, side: int
) -> tf.Tensor:
    """Sets a square of every image to zero, which is the mean of scaled images.

    Args:
        images: float32 [batch, height, width, channels], scaled.
        vertical: float32 [batch] in [0, 1), where the square lies within the image.
        horizontal: The same, from left to right.
        side: Of the square, in pixels of 32.

    Returns:
        float32 [batch, height, width, channels].
    """
    places = []
    for place, size in zip((vertical, horizontal), images.shape[1:3], strict=True):
        taken = tf.fill(place.shape, tf.constant(round(size * side / 32), tf.float64))
        places.append(_within(place, taken, size))
    cut = places[0][:, :, None] & places[1][:, None, :]
    return tf.where(cut[..., None], 0.0, images)


def _within(place: tf.Tensor, taken: tf.Tensor, size: int) -> tf.Tensor:
    """Returns which pixels along a side are erased, bool [batch, size]."""
    first = tf.floor(tf.cast(place, tf.float64) * (size - taken + 1.0))[:, None]
    pixels = tf.range(size, dtype=tf.float64)
    return (pixels >= first) & (pixels < first + taken[:, None])
