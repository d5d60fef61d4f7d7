"""Scores a model on a set of images, every image exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from cifar10 import metrics, model as models


def evaluate(
    model: keras.Model,
    trainable: Sequence[tf.Tensor],
    batches: tf.data.Dataset,
    classes: int,
    device_names: Sequence[str],
) -> tuple[metrics.Sums, float]:
    """Scores a model on every image of some batches, each exactly once.

    Args:
        model: The model; its non-trainable variables are used as they are.
        trainable: Values for its trainable variables, such as their averages.
        batches: (images, labels, mask) as `input.evaluation_batches` makes them.
        classes: Number of classes.
        device_names: Devices that take the batches in turn.

    Returns:
        The sums over all images that the masks let count, and the weight decay.
    """

    @tf.function(autograph=False)
    def score(
        values: list[tf.Tensor], images: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        logits, _, penalties = models.inference(
            model, values, model.non_trainable_variables, images, training=False
        )
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        predictions = tf.argmax(logits, axis=1)
        confusion = tf.math.confusion_matrix(
            labels,
            predictions,
            classes,
            weights=tf.cast(mask, tf.int64),
            dtype=tf.int64,
        )
        among_5 = tf.math.in_top_k(labels, tf.cast(logits, tf.float32), min(5, classes))
        return (
            tf.reduce_sum(tf.where(mask, tf.cast(cross_entropy, tf.float64), 0.0)),
            tf.math.count_nonzero(among_5 & mask),
            confusion,
            tf.add_n(list(penalties)) if penalties else tf.constant(0.0),
        )

    total = metrics.Sums.nothing(classes)
    weight_decay = tf.constant(0.0)
    values = list(trainable)
    for number, batch in enumerate(batches):
        with tf.device(device_names[number % len(device_names)]):
            cross_entropy, correct_at_5, confusion, weight_decay = score(values, *batch)
        total += metrics.Sums(
            float(cross_entropy), int(correct_at_5), confusion.numpy()
        )
    return total, float(weight_decay)
