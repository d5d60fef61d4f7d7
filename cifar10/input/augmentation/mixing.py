"""Mixup and cutmix: images that are parts of two, and labels that say so.

Zhang et al., https://arxiv.org/abs/1710.09412, and Yun et al.,
https://arxiv.org/abs/1905.04899. Not Keras's `MixUp` and `CutMix`: they shuffle the
batch that they are given, so N towers would mix other pairs than one.

Image 2 k of the global batch mixes with image 2 k + 1 and the reverse, each by its own
weight. Which images come side by side is random, like the order of all, and no tower,
worker or disk needs more images than without mixing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

# This many equally probable values stand for a continuous distribution.
_QUANTILES = 4096


class Mixing:
    """Mixes the images of a batch, and their labels.

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
