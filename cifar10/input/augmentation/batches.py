"""Makes batches as the plain input does, and augments them.

RandAugment changes the pixels of the images before they are distorted; erasing and
mixing change the distorted ones, and mixing their labels. Random values are drawn
by seed and step for the global batch, like those of `distortions.py`; separate streams
keep the latter the same as without an augmentation.
"""

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from cifar10.config.augmentation import MIXING, resolve
from cifar10.input.augmentation import erasing, rand_augment
from cifar10.input.augmentation.mixing import Mixing
from cifar10.input.distortions import uniform
from cifar10.input.pipeline import Part, Plan, TowerBatch, make_batch

# A run's seed has 31 bits; those above tell streams of random numbers apart.
_STREAM = 2**32
_RAND_AUGMENT, _ERASING, _NOISE, _MIXING, _CUTOUT = range(_STREAM, 6 * _STREAM, _STREAM)


class AugmentedBatches:
    """Makes the batches of a training, in place of `pipeline.make_batch`.

    Args:
        declared: As `Config.augmentation`.
        classes: Labels are 0 to `classes - 1`.
    """

    def __init__(self, declared: Mapping[str, Any], classes: int) -> None:
        parts = resolve(declared)
        self._rand_augment = parts.get("rand_augment")
        self._erasing = parts.get("random_erasing")
        self._cutout = parts.get("cutout")
        mixing = {name: parts[name] for name in MIXING if name in parts}
        self._mixing = Mixing(classes, **mixing) if mixing else None

    def __call__(
        self,
        chosen: tf.Tensor,
        labels: tf.Tensor,
        plan: Plan,
        part: Part,
        *how: Any,
    ) -> TowerBatch:
        """Makes a part of a global batch; the arguments are those of `make_batch`.

        Returns:
            Images, float32 [count, ...], and labels: int64 [count] as they were given,
            or, where images are mixed, float32 [count, classes], whose rows sum to 1.
        """
        draw = functools.partial(_draw, plan, part)
        if self._rand_augment:
            count = rand_augment.numbers(self._rand_augment["operations"])
            drawn = draw(_RAND_AUGMENT, count)
            chosen = rand_augment.apply(chosen, drawn, **self._rand_augment)
        images, labels = make_batch(chosen, labels, plan, part, *how)
        if self._erasing:
            noise = uniform(images.shape[1:], plan.seed + _stream(_NOISE))
            drawn = draw(_ERASING, erasing.NUMBERS)
            images = erasing.erase(images, drawn, noise, **self._erasing)
        if self._cutout:
            images = erasing.cut_out(images, *draw(_CUTOUT, 2), **self._cutout)
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
