"""Augments training images as a recipe's `augmentation` table declares.

Augmentations change distorted images; mixup and cutmix also change labels. As in
`distortions.py`, random values for a global batch depend on seed and step. Each
augmentation has its own random stream, so adding one leaves the distortions unchanged.

Keras's own layers are not used. `RandomErasing` draws height and width independently,
and clips noise to the range of pixel values. `MixUp` and `CutMix` shuffle each batch,
so the number of towers would change which images are mixed. Here images 2 k and 2 k + 1
of the global batch mix with each other, and each image has its own weight. The order of
images is random, so the pairs are random too. Both images of a pair are on one tower.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.config.augmentation import MIXING, resolve
from cifar10.input import distortions
from cifar10.input.distortions import BatchSlice, Pair, draw, uniform

# The erased fraction of the image's area, and its ratio of width to height (section 5.1
# of the paper). The ratio's logarithm is drawn uniformly, as in torchvision, so that
# tall and wide rectangles are equally frequent.
AREA_RANGE = (0.02, 0.4)
RATIO_RANGE = (0.3, 1 / 0.3)

# Random numbers per image. Erasing draws whether to erase, two coordinates, the noise's
# shift, and sizes to try. Mixing draws mixup or cutmix, a weight, and two coordinates.
ERASING_NUMBERS = 4 + 2 * distortions.CROP_ATTEMPTS
MIXING_NUMBERS = 4

# The number of equally probable values that approximate a beta distribution.
_QUANTILES = 4096


class Augmentation:
    """Augments distorted training images, as a recipe declares."""

    def __init__(self, declared: Mapping[str, Any], classes: int) -> None:
        self._parts = resolve(declared)
        self._mixing = {name: self._parts.get(name) for name in MIXING}
        self._classes = classes

    def __call__(
        self, images: tf.Tensor, labels: tf.Tensor, seed: tf.Tensor, part: BatchSlice
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Applies the declared augmentations to a distorted batch, mixing last."""
        if given := self._parts.get("random_erasing"):
            with tf.device("/cpu:0"):
                seeds = tf.unstack(tf.reshape(_stream(seed, "noise"), [-1, 2]))
                noise = tf.stack([uniform(images.shape[1:], one) for one in seeds])
            if len(seeds) > 1:
                noise = tf.repeat(noise, part.batch_size, axis=0)
            drawn = draw(ERASING_NUMBERS, _stream(seed, "random_erasing"), part)
            images = erase(images, drawn, noise, **given)
        for name, (numbers, change) in SINGLE.items():
            if given := self._parts.get(name):
                drawn = draw(numbers, _stream(seed, name), part)
                images = change(images, *drawn, **given)
        if any(self._mixing.values()):
            drawn = draw(MIXING_NUMBERS, _stream(seed, "mixing"), part)
            images, labels = mix(images, labels, drawn, self._classes, **self._mixing)
        return images, labels


def _stream(seed: tf.Tensor, name: str) -> tf.Tensor:
    """Returns a step's seed for one of `STREAMS`."""
    with tf.device("/cpu:0"):
        return seed + tf.constant([2**32 * (1 + STREAMS.index(name)), 0], tf.int64)


def erase(
    images: tf.Tensor, drawn: Sequence[tf.Tensor], noise: tf.Tensor, probability: float
) -> tf.Tensor:
    """Fills a rectangle, 2 to 40 % of an image, with noise (random erasing).

    Zhong et al., https://arxiv.org/abs/1708.04896. The noise is uniform, as there, with
    mean 0 and variance 1, like images.

    Args:
        images: float32 [batch, height, width, channels], scaled.
        drawn: Random numbers: `ERASING_NUMBERS` tensors, float32 [batch] in [0, 1).
        noise: float32 [height, width, channels] in [0, 1), for all images, or one for
            each. For each image, a random number is added to it, modulo 1, so that no
            tower has to draw noise for the images of other towers.
        probability: Probability that an image is erased.
    """
    chance, *place, shift = drawn[:4]
    size, nothing = images.shape[1:3], (0, 0)  # If no size fits, nothing is erased.
    sizes = distortions.random_sizes(size, drawn[4:], AREA_RANGE, RATIO_RANGE, nothing)
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
        vertical: float32 [batch], position of the square from top (0) to bottom (1).
        horizontal: float32 [batch], position from left (0) to right (1).
        side: Side of the square for images of 32 x 32 pixels; scaled for other images.
    """
    sides = (round(size * side / 32) for size in images.shape[1:3])
    sizes = [tf.fill(vertical.shape, tf.constant(one, tf.float64)) for one in sides]
    return tf.where(_rectangle(images, (vertical, horizontal), sizes), 0.0, images)


def mix(
    images: tf.Tensor,
    labels: tf.Tensor,
    drawn: Sequence[tf.Tensor],
    classes: int,
    mixup: Mapping[str, float] | None = None,
    cutmix: Mapping[str, float] | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes pairs of images and labels: by means (mixup) or pasted boxes (cutmix).

    Zhang et al., https://arxiv.org/abs/1710.09412, and Yun et al.,
    https://arxiv.org/abs/1905.04899.

    Args:
        images: float32 [batch, height, width, channels], with an even batch size.
        labels: int64 [batch].
        drawn: Random numbers: `MIXING_NUMBERS` tensors, float32 [batch] in [0, 1).
        classes: The number of classes.
        mixup: The `probability` of mixup, and `alpha` of the beta distribution that
            weights are drawn from. None disables mixup.
        cutmix: The same for cutmix.

    Returns:
        Images of the same shape; labels, float32 [batch, classes]: each class's share.
    """
    kind, chance, vertical, horizontal = drawn
    ways = mixup, cutmix
    of_mixup, of_cutmix = (way["probability"] if way else 0.0 for way in ways)
    is_mixup = kind < of_mixup
    is_cutmix = ~is_mixup & (kind < of_mixup + of_cutmix)
    place = tf.cast(chance * _QUANTILES, tf.int64)
    alphas = (way["alpha"] if way else None for way in ways)
    to_mixup, to_cutmix = (tf.gather(quantiles_of_beta(one), place) for one in alphas)

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
    """Returns equally probable values of Beta(alpha, alpha), float64 [4096].

    All are 1 if `alpha` is None. TensorFlow itself samples Beta only on CPUs.
    """
    probabilities = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    low, high = np.zeros(_QUANTILES), np.ones(_QUANTILES)
    if alpha is None:
        return high
    for _ in range(np.finfo(np.float64).nmant):
        middle = (low + high) / 2
        # Outside the graph and on the CPU, so that all workers compute the same bits.
        with tf.init_scope(), tf.device("/cpu:0"):
            a = tf.constant(alpha, tf.float64)
            is_below = tf.math.betainc(a, a, middle).numpy() < probabilities
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return (low + high) / 2


def _rectangle(
    images: tf.Tensor, place: Sequence[tf.Tensor], sizes: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns a mask of one rectangle per image, at the random position `place`."""
    sides = []
    for side, chance, taken in zip(images.shape[1:3], place, sizes, strict=True):
        first = tf.floor(tf.cast(chance, tf.float64) * (side - taken + 1.0))
        sides.append((first, first + taken))
    return _between(images, *sides)


def _box(side: tf.Tensor, place: tf.Tensor, size: int) -> Pair:
    """Returns start and end of cutmix boxes, clipped at the edge as in the paper."""
    half = tf.floor(tf.floor(side * size) / 2.0)
    centre = tf.floor(tf.cast(place, tf.float64) * size)
    return tf.maximum(centre - half, 0.0), tf.minimum(centre + half, float(size))


def _between(images: tf.Tensor, rows: Pair, columns: Pair) -> tf.Tensor:
    """Returns a mask, bool [batch, ..., 1], of pixels from start to end (exclusive)."""
    _, height, width, _ = images.shape
    row = tf.range(height, dtype=tf.float64)[None, :, None, None]
    column = tf.range(width, dtype=tf.float64)[None, None, :, None]
    top, bottom, left, right = map(_expanded, (*rows, *columns))
    return (row >= top) & (row < bottom) & (column >= left) & (column < right)


def _expanded(of_images: tf.Tensor) -> tf.Tensor:
    """Reshapes [batch] to [batch, 1, 1, 1], to broadcast over images."""
    return of_images[:, None, None, None]


def _partners(values: tf.Tensor) -> tf.Tensor:
    """Swaps the first and second value of a batch, the third and fourth, and so on."""
    pairs = tf.reshape(values, [-1, 2, *values.shape[1:]])
    return tf.reshape(tf.reverse(pairs, [1]), values.shape)


def _weighted(values: tf.Tensor, others: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns `weight * values + (1 - weight) * others`, with one weight per image."""
    weight = tf.reshape(weight, [-1, *[1] * (len(values.shape) - 1)])
    return weight * values + (1.0 - weight) * others


# Augmentations of single images, in the order in which they are applied: the count of
# random numbers per image, and a function of images, these numbers and recipe values.
SINGLE: Mapping[str, tuple[int, Callable[..., tf.Tensor]]] = {"cutout": (2, cut_out)}
# Random streams, numbered above the 31 bits of a run's seed. Append new augmentations:
# another order would change the results of every run. The first was RandAugment's.
STREAMS = ("unused", "random_erasing", "noise", "mixing", "cutout")
