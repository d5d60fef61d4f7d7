"""Scores a model on a set of images, every image exactly once."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar10.evaluation import metrics
from cifar10.follower import trained_model
from cifar10.towers.graphs import traced


class Outcomes(NamedTuple):
    """The result of each image of a batch."""

    cross_entropy: np.ndarray  # floating [images]
    predictions: np.ndarray  # int64 [images], the class with the largest logit.
    confidence: np.ndarray  # float32 [images], the probability of that class.


class Scorer:
    """Scores a model any number of times; it is traced once.

    Its non-trainable variables are used as they are. With `test_time_augmentation` it
    averages the logits of an image's six `views`.
    """

    def __init__(
        self, model: keras.Model, classes: int, *, test_time_augmentation: bool = False
    ) -> None:
        self._model = model
        self._classes = classes
        self._augment = test_time_augmentation
        self._score = traced(self._trace_score)

    def score(
        self,
        trainable: Sequence[tf.Tensor],
        batches: tf.data.Dataset,
        device: str,
        watch: Callable[[Outcomes], None] | None = None,
    ) -> tuple[metrics.Sums, float]:
        """Scores the model on every image of some batches.

        Args:
            trainable: Values for its trainable variables, such as their averages.
            batches: (images, labels, mask) as `input.evaluation_batches` makes them.
            device: Device that computes.
            watch: Called with the outcomes of each batch, in order.

        Returns:
            The sums over all images that the masks select, and the weight decay.
        """
        total = metrics.Sums.zero(self._classes)
        weight_decay = tf.constant(0.0)
        values = [tf.convert_to_tensor(value) for value in trainable]
        for batch in batches:
            with tf.device(device):
                sums, each, weight_decay = self._score(values, *batch)
            cross_entropy, ranks, confusion = sums
            total += metrics.Sums(
                float(cross_entropy), ranks.numpy(), confusion.numpy()
            )
            if watch:
                counted = batch[-1].numpy()
                watch(Outcomes(*(tensor.numpy()[counted] for tensor in each)))
        return total, float(weight_decay)

    def _trace_score(
        self,
        values: list[tf.Tensor],
        images: tf.Tensor,
        labels: tf.Tensor,
        mask: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...], tf.Tensor]:
        """Returns the sums, the outcomes of each image, and the weight decay."""
        logits, penalties = self._logits(values, images)
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        predictions = tf.argmax(logits, axis=1)
        confusion = tf.math.confusion_matrix(
            labels,
            predictions,
            self._classes,
            weights=tf.cast(mask, tf.int64),
            dtype=tf.int64,
        )
        sums = (
            tf.reduce_sum(tf.where(mask, tf.cast(cross_entropy, tf.float64), 0.0)),
            _ranks(logits, labels, mask),
            confusion,
        )
        confidence = tf.reduce_max(tf.nn.softmax(logits), axis=1)
        return (
            sums,
            (cross_entropy, predictions, tf.cast(confidence, tf.float32)),
            tf.add_n(list(penalties)) if penalties else tf.constant(0.0),
        )

    def _logits(
        self, values: list[tf.Tensor], images: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns logits, in float32 or better, and the model's penalties."""
        parts = []
        for view, weight in views(images) if self._augment else [(images, 1.0)]:
            logits, penalties = trained_model.evaluation_logits(
                self._model, values, self._model.non_trainable_variables, view
            )
            parts.append(logits * weight)
        return functools.reduce(operator.add, parts), penalties


def _ranks(logits: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Counts images by the rank of their class, as `metrics.Sums.ranks` does."""
    classes = logits.shape[1]
    own = tf.gather(logits, labels, batch_dims=1)
    rank = tf.math.count_nonzero(logits > own[:, None], axis=1)
    counts = mask & tf.reduce_all(tf.math.is_finite(logits), axis=1)
    return tf.scatter_nd(
        tf.where(counts, rank, 0)[:, None], tf.cast(counts, tf.int64), [classes]
    )


def values_scored(settings: Mapping[str, Any], *, use_averages: bool = True) -> str:
    """Returns which values of a run's variables are scored, in words."""
    is_averaged = use_averages and settings.get("moving_average_decay") != 0
    return "averaged variables" if is_averaged else "the variables themselves"


def views(images: tf.Tensor) -> list[tuple[tf.Tensor, float]]:
    """Returns six views of each image and their weights, as airbench94 scores.

    They are the image itself, moved up and left by a pixel, and moved down and right,
    each also mirrored. The unmoved ones weigh as much as all moved ones. Images are
    floating [batch, height, width, channels].
    """
    _, height, width, _ = images.shape
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    moved = [
        (images, 0.25),
        (padded[:, 2:, 2:], 0.125),
        (padded[:, :height, :width], 0.125),
    ]
    return [
        (seen, weight)
        for view, weight in moved
        for seen in (view, tf.reverse(view, axis=[2]))
    ]
