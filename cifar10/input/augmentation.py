"""A recipe's augmentation: what is done to images besides the distortions.

RandAugment (`rand_augment.py`) changes the pixels of images before they are distorted;
erasing, cutout, mixup and cutmix change the distorted ones, and the latter two their
labels. Random values are drawn by seed and step for the global batch, like those of
`distortions.py`; separate streams keep the latter the same as without an augmentation.

Keras's layers of these names cannot take their place. `RandomErasing` draws height and
width apart, and noise that is clipped to black and white; `MixUp` and `CutMix` shuffle
the batch that they are given, so N towers would mix other pairs than one. Here image
2 k of the global batch mixes with image 2 k + 1 and the reverse, each by its own
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
from cifar10.input.distortions import CROP_ATTEMPTS, random_sizes, uniform
from cifar10.input.pipeline import Part, Plan, TowerBatch

# A run's seed has 31 bits; those above tell streams of random numbers apart. A new
# augmentation's stream comes last: its place is part of every run's result.
_STREAM = 2**32
_RAND_AUGMENT, _ERASING, _NOISE, _MIXING, _CUTOUT = range(_STREAM, 6 * _STREAM, _STREAM)

# Of erasing: the part of the image's area and the ratio of width to height, of section
# 5.1 of its paper. Ratios are drawn evenly by their logarithm, as in torchvision, so
# that tall and wide ones are alike.
AREA_RANGE = (0.02, 0.4)
RATIO_RANGE = (0.3, 1 / 0.3)

# Random numbers per image: whether, where, the noise's shift, and the sizes to try.
ERASING_NUMBERS = 4 + 2 * CROP_ATTEMPTS

# This many equally probable values stand for a continuous distribution.
_QUANTILES = 4096


class Augmentation:
    """Changes the images of a training, as `BatchMaker.make` asks it to.

    Args:
        declared: As `config.images.augmentation`.
        classes: Labels are 0 to `classes - 1`.
    """

    def __init__(self, declared: Mapping[str, Any], classes: int) -> None:
        self._parts = resolve(declared)
        mixing = {name: self._parts[name] for name in MIXING if name in self._parts}
        self._mixing = Mixing(classes, **mixing) if mixing else None

    def change_pixels(self, images: tf.Tensor, plan: Plan, part: Part) -> tf.Tensor:
        """Applies RandAugment."""
        if given := self._parts.get("rand_augment"):
            count = rand_augment.numbers(given["operations"])
            drawn = _draw(plan, part, _RAND_AUGMENT, count)
            images = rand_augment.apply(images, drawn, **given)
        return images

    def change_distorted(
        self, images: tf.Tensor, labels: tf.Tensor, plan: Plan, part: Part
    ) -> TowerBatch:
        """Erases and mixes; labels are as `BatchMaker.make` describes them."""
        draw = functools.partial(_draw, plan, part)
        if given := self._parts.get("random_erasing"):
            noise = uniform(images.shape[1:], plan.seed + _stream(_NOISE))
            images = erase(images, draw(_ERASING, ERASING_NUMBERS), noise, **given)
        if given := self._parts.get("cutout"):
            images = cut_out(images, *draw(_CUTOUT, 2), **given)
        if self._mixing:
            images, labels = self._mixing(images, labels, draw(_MIXING, Mixing.NUMBERS))
        return images, labels


def _draw(plan: Plan, part: Part, stream: int, count: int) -> list[tf.Tensor]:
    """Draws some numbers per image, float32 [batch] each, in [0, 1).

    They are drawn for the global batch, so those of a part are those in the whole.
    """
    drawn = uniform([count, part.global_batch_size], plan.seed + _stream(stream))
    return tf.unstack(drawn[:, part.first : part.first + part.batch_size])


def _stream(number: int) -> tf.Tensor:
    return tf.constant([number, 0], tf.int64)


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
    """Sets a square of every image to zero, the mean of scaled images (cutout).

    DeVries and Taylor, https://arxiv.org/abs/1708.04552.

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


class Mixing:
    """Mixes the images of a batch, and their labels, by mixup and cutmix.

    Zhang et al., https://arxiv.org/abs/1710.09412, and Yun et al.,
    https://arxiv.org/abs/1905.04899.

    Args:
        classes: Labels are 0 to `classes - 1`.
        mixup: `alpha` of the distribution of weights, and `probability`.
        cutmix: The same; None for no images of this kind.
    """

    NUMBERS = 4  # Random ones per image: which kind, its weight, and the box's place.

    def __init__(
        self,
        classes: int,
        mixup: Mapping[str, float] | None = None,
        cutmix: Mapping[str, float] | None = None,
    ) -> None:
        self._classes = classes
        self._shares = [
            kind["probability"] if kind else 0.0 for kind in (mixup, cutmix)
        ]
        self._quantiles = [
            quantiles_of_beta(kind["alpha"]) if kind else np.ones(_QUANTILES)
            for kind in (mixup, cutmix)
        ]

    def __call__(
        self, images: tf.Tensor, labels: tf.Tensor, drawn: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mixes each image with its partner.

        Args:
            images: float32 [batch, height, width, channels], an even number of them.
            labels: int64 [batch].
            drawn: `NUMBERS` tensors, float32 [batch] in [0, 1).

        Returns:
            Images of the same shape, and labels, float32 [batch, classes]: what part of
            the image is of each class.
        """
        kind, chance, vertical, horizontal = drawn
        of_mixup, of_cutmix = self._shares
        is_mixup = kind < of_mixup
        is_cutmix = ~is_mixup & (kind < of_mixup + of_cutmix)
        place = tf.cast(chance * _QUANTILES, tf.int64)
        to_mixup, to_cutmix = (tf.gather(values, place) for values in self._quantiles)

        _, height, width, _ = images.shape
        side = tf.sqrt(1.0 - to_cutmix)
        rows, tall = _box(side, vertical, height)
        columns, wide = _box(side, horizontal, width)
        is_pasted = is_cutmix[:, None, None] & rows[:, :, None] & columns[:, None, :]
        remaining = 1.0 - tall * wide / (height * width)

        one = tf.ones_like(to_mixup)
        blend = tf.cast(tf.where(is_mixup, to_mixup, one), tf.float32)
        weight = tf.where(is_cutmix, tf.cast(remaining, tf.float32), blend)
        partners = _partners(images)
        mixed = tf.where(
            is_pasted[..., None], partners, _weighted(images, partners, blend)
        )
        shares = tf.one_hot(labels, self._classes)
        return mixed, _weighted(shares, _partners(shares), weight)


def quantiles_of_beta(alpha: float) -> np.ndarray:
    """Returns values that Beta(alpha, alpha) takes equally often, float64 [4096].

    TensorFlow draws from this distribution only on CPUs, and XLA not at all.
    """
    probabilities = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    low, high = np.zeros(_QUANTILES), np.ones(_QUANTILES)
    for _ in range(np.finfo(np.float64).nmant):
        middle = (low + high) / 2
        with tf.device("/cpu:0"):  # Every worker is to find the same bits.
            a = tf.constant(alpha, tf.float64)
            is_below = tf.math.betainc(a, a, middle).numpy() < probabilities
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return (low + high) / 2


def _box(side: tf.Tensor, place: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns which pixels along a side are in a box, and how many; float64 [batch].

    The box is centred anywhere, and cut off at the image's edge, as the paper's is.
    """
    half = tf.floor(tf.floor(side * size) / 2.0)
    centre = tf.floor(tf.cast(place, tf.float64) * size)
    first = tf.maximum(centre - half, 0.0)
    end = tf.minimum(centre + half, float(size))
    pixels = tf.range(size, dtype=tf.float64)
    return (pixels >= first[:, None]) & (pixels < end[:, None]), end - first


def _partners(values: tf.Tensor) -> tf.Tensor:
    """Exchanges the first and second of a batch, the third and fourth, and so on."""
    pairs = tf.reshape(values, [-1, 2, *values.shape[1:]])
    return tf.reshape(tf.reverse(pairs, [1]), values.shape)


def _weighted(values: tf.Tensor, others: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns a mean of two values by the weight, float32 [batch], of the first."""
    weight = tf.reshape(weight, [-1, *[1] * (len(values.shape) - 1)])
    return weight * values + (1.0 - weight) * others
