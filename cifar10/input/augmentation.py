"""A recipe's augmentation: what is done to images besides the distortions.

RandAugment (`rand_augment.py`) changes the pixels of images before they are distorted;
erasing, cutout, mixup and cutmix change the distorted ones, mixup and cutmix the labels
too. Random values are drawn by seed and step for the global batch, like those of
`distortions.py`; separate streams leave the distortions as without an augmentation.

Keras's layers of these names cannot take their place. `RandomErasing` draws height and
width independently, and clips its noise to black and white; `MixUp` and `CutMix`
shuffle the batch that they are given, so N towers would mix other pairs than one. Here
image 2 k of the global batch mixes with image 2 k + 1 and vice versa, each by its own
weight. Which images come side by side is random, like the order of all, and no tower,
worker or disk needs more images than without mixing.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.config.augmentation import MIXING, resolve
from cifar10.input import rand_augment
from cifar10.input.distortions import (
    CROP_ATTEMPTS,
    BatchSlice,
    draw,
    random_sizes,
    uniform,
)
from cifar10.input.pipeline import Plan, TowerBatch

# A run's seed has 31 bits; higher bits tell streams of random numbers apart. A new
# augmentation's stream comes last: a stream's place is part of every run's result.
_STREAM = 2**32
_RAND_AUGMENT, _ERASING, _ERASING_NOISE, _MIXING, _CUTOUT = range(
    _STREAM, 6 * _STREAM, _STREAM
)

# For erasing, the fraction of the image's area and the ratio of width to height, from
# section 5.1 of its paper. Ratios are drawn uniformly in their logarithm, as in
# torchvision, so that tall and wide rectangles are equally frequent.
AREA_RANGE = (0.02, 0.4)
RATIO_RANGE = (0.3, 1 / 0.3)

# Random numbers per image. For erasing: whether, where, the noise's shift, and the
# sizes to try; for mixing: the kind, the weight, and the box's place.
ERASING_NUMBERS = 4 + 2 * CROP_ATTEMPTS
MIXING_NUMBERS = 4

# This many equally probable values stand for a continuous distribution.
_QUANTILES = 4096


class Augmentation:
    """Augments the images of a training, before and after their distortion.

    Args:
        declared: As `config.images.augmentation`.
        classes: Labels are 0 to `classes - 1`.
    """

    def __init__(self, declared: Mapping[str, Any], classes: int) -> None:
        self._parts = resolve(declared)
        self._mixing = {name: self._parts.get(name) for name in MIXING}
        self._classes = classes

    def before_distortion(
        self, images: tf.Tensor, plan: Plan, batch_slice: BatchSlice
    ) -> tf.Tensor:
        """Applies RandAugment; the arguments are those of `BatchMaker.make`."""
        if given := self._parts.get("rand_augment"):
            count = 2 * given["operations"]
            drawn = draw(count, _stream(plan, _RAND_AUGMENT), batch_slice)
            images = rand_augment.apply(images, drawn, **given)
        return images

    def after_distortion(
        self, images: tf.Tensor, labels: tf.Tensor, plan: Plan, batch_slice: BatchSlice
    ) -> TowerBatch:
        """Erases and mixes distorted images; returns what `BatchMaker.make` does."""
        if given := self._parts.get("random_erasing"):
            noise = uniform(images.shape[1:], _stream(plan, _ERASING_NOISE))
            drawn = draw(ERASING_NUMBERS, _stream(plan, _ERASING), batch_slice)
            images = erase(images, drawn, noise, **given)
        if given := self._parts.get("cutout"):
            drawn = draw(2, _stream(plan, _CUTOUT), batch_slice)
            images = cut_out(images, *drawn, **given)
        if any(self._mixing.values()):
            drawn = draw(MIXING_NUMBERS, _stream(plan, _MIXING), batch_slice)
            images, labels = mix(images, labels, drawn, self._classes, **self._mixing)
        return images, labels


def _stream(plan: Plan, number: int) -> tf.Tensor:
    """Returns the seed of one stream of random numbers of a step."""
    return plan.seed + tf.constant([number, 0], tf.int64)


def erase(
    images: tf.Tensor, drawn: Sequence[tf.Tensor], noise: tf.Tensor, probability: float
) -> tf.Tensor:
    """Fills a rectangle of some of the images with noise (random erasing).

    Zhong et al., https://arxiv.org/abs/1708.04896.

    The noise is uniform, like the paper's over all values of a pixel, with the zero
    mean and unit variance of scaled images.

    Args:
        images: float32 [batch, height, width, channels], scaled.
        drawn: `ERASING_NUMBERS` tensors, float32 [batch] in [0, 1).
        noise: float32 [height, width, channels] in [0, 1). It is shifted by another
            number for each image, so that no tower has to draw noise for the images
            of others.
        probability: How often an image is erased.

    Returns:
        float32 [batch, height, width, channels].
    """
    chance, *place, shift = drawn[:4]
    size, nothing = images.shape[1:3], (0, 0)  # Erased where no size fits.
    sizes = random_sizes(size, drawn[4:], AREA_RANGE, RATIO_RANGE, nothing)
    erased = _expanded(chance < probability) & _rectangle(images, place, sizes)
    moved = tf.math.floormod(noise + _expanded(shift), 1.0)
    return tf.where(erased, (moved - 0.5) * 12**0.5, images)


def cut_out(
    images: tf.Tensor, vertical: tf.Tensor, horizontal: tf.Tensor, side: int
) -> tf.Tensor:
    """Sets a square of every image to zero, the mean of scaled images (cutout).

    DeVries and Taylor, https://arxiv.org/abs/1708.04552.

    Args:
        images: float32 [batch, height, width, channels], scaled.
        vertical: float32 [batch] in [0, 1), where the square lies within the image.
        horizontal: The same, from left to right.
        side: Side of the square, in pixels of 32.

    Returns:
        float32 [batch, height, width, channels].
    """
    sizes = [
        tf.fill(vertical.shape, tf.constant(round(size * side / 32), tf.float64))
        for size in images.shape[1:3]
    ]
    cut = _rectangle(images, (vertical, horizontal), sizes)
    return tf.where(cut, 0.0, images)


def mix(
    images: tf.Tensor,
    labels: tf.Tensor,
    drawn: Sequence[tf.Tensor],
    classes: int,
    mixup: Mapping[str, float] | None = None,
    cutmix: Mapping[str, float] | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each image of a batch, and its label, with its partner.

    Zhang et al., https://arxiv.org/abs/1710.09412, and Yun et al.,
    https://arxiv.org/abs/1905.04899.

    Args:
        images: float32 [batch, height, width, channels], an even number of them.
        labels: int64 [batch].
        drawn: `MIXING_NUMBERS` tensors, float32 [batch] in [0, 1).
        classes: Labels are 0 to `classes - 1`.
        mixup: `alpha` of the distribution of weights, and `probability`.
        cutmix: The same; None for no images of this kind.

    Returns:
        Images of the same shape, and labels, float32 [batch, classes]: the fraction
        of the image that is of each class.
    """
    kind, chance, vertical, horizontal = drawn
    of_mixup, of_cutmix = (
        way["probability"] if way else 0.0 for way in (mixup, cutmix)
    )
    is_mixup = kind < of_mixup
    is_cutmix = ~is_mixup & (kind < of_mixup + of_cutmix)
    place = tf.cast(chance * _QUANTILES, tf.int64)
    to_mixup, to_cutmix = (
        tf.gather(quantiles_of_beta(way["alpha"] if way else None), place)
        for way in (mixup, cutmix)
    )

    _, height, width, _ = images.shape
    side = tf.sqrt(1.0 - to_cutmix)
    rows, columns = _box(side, vertical, height), _box(side, horizontal, width)
    (top, bottom), (left, right) = rows, columns
    remaining = 1.0 - (bottom - top) * (right - left) / (height * width)
    is_pasted = _expanded(is_cutmix) & _between(images, rows, columns)

    blend = tf.cast(tf.where(is_mixup, to_mixup, tf.ones_like(to_mixup)), tf.float32)
    weight = tf.where(is_cutmix, tf.cast(remaining, tf.float32), blend)
    partners = _partners(images)
    mixed = tf.where(is_pasted, partners, _weighted(images, partners, blend))
    shares = tf.one_hot(labels, classes)
    return mixed, _weighted(shares, _partners(shares), weight)


@functools.cache
def quantiles_of_beta(alpha: float | None) -> np.ndarray:
    """Returns values that Beta(alpha, alpha) takes equally often, float64 [4096].

    Without an alpha they are 1. TensorFlow draws from this distribution only on
    CPUs.
    """
    probabilities = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    low, high = np.zeros(_QUANTILES), np.ones(_QUANTILES)
    if alpha is None:
        return high
    for _ in range(np.finfo(np.float64).nmant):
        middle = (low + high) / 2
        # Outside the graph, and on the CPU: every worker is to find the same bits.
        with tf.init_scope(), tf.device("/cpu:0"):
            a = tf.constant(alpha, tf.float64)
            is_below = tf.math.betainc(a, a, middle).numpy() < probabilities
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return (low + high) / 2


def _rectangle(
    images: tf.Tensor, place: Sequence[tf.Tensor], sizes: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns which pixels are in rectangles of some sizes, at places in [0, 1)."""
    sides = []
    for side, chance, taken in zip(images.shape[1:3], place, sizes, strict=True):
        first = tf.floor(tf.cast(chance, tf.float64) * (side - taken + 1.0))
        sides.append((first, first + taken))
    return _between(images, *sides)


def _box(side: tf.Tensor, place: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where a box begins along a side and where it ends (exclusive), [batch].

    The box is centred anywhere, and cut off at the image's edge, as the paper's is.
    """
    half = tf.floor(tf.floor(side * size) / 2.0)
    centre = tf.floor(tf.cast(place, tf.float64) * size)
    return tf.maximum(centre - half, 0.0), tf.minimum(centre + half, float(size))


def _between(
    images: tf.Tensor,
    rows: tuple[tf.Tensor, tf.Tensor],
    columns: tuple[tf.Tensor, tf.Tensor],
) -> tf.Tensor:
    """Returns which pixels are between two rows and columns, bool [batch, ..., 1].

    Rows and columns are pairs of float64 [batch]: the first inside, and the first
    beyond.
    """
    _, height, width, _ = images.shape
    row = tf.range(height, dtype=tf.float64)[None, :, None, None]
    column = tf.range(width, dtype=tf.float64)[None, None, :, None]
    top, bottom, left, right = map(_expanded, (*rows, *columns))
    return (row >= top) & (row < bottom) & (column >= left) & (column < right)


def _expanded(of_images: tf.Tensor) -> tf.Tensor:
    """Reshapes a number per image, [batch], so that it broadcasts over images."""
    return of_images[:, None, None, None]


def _partners(values: tf.Tensor) -> tf.Tensor:
    """Exchanges the first and second of a batch, the third and fourth, and so on."""
    pairs = tf.reshape(values, [-1, 2, *values.shape[1:]])
    return tf.reshape(tf.reverse(pairs, [1]), values.shape)


def _weighted(values: tf.Tensor, others: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the mean of two values; `weight`, float32 [batch], is the first one's."""
    weight = tf.reshape(weight, [-1, *[1] * (len(values.shape) - 1)])
    return weight * values + (1.0 - weight) * others
