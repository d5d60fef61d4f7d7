"""Inference and loss of a model, as pure functions.

The model, which `models/registry.py` builds once, is any Keras model that maps images
to logits. Each tower passes `inference` the variables' values, its only state.
"""

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from cifar10.models.layer_tree import written_variables
from cifar10.models.stateless import Call
from cifar10.models.step_metrics import STEP_METRICS

_IMAGES, _LOGITS = 2, 8  # Those that `probe` takes and returns.
# Large images, and small offsets, so that activations differ where they are bent.
_DEVIATION, _OFFSET, _VARIATION = 3.0, 0.5, 0.1


def inference(
    model: keras.Model,
    trainable: Sequence[tf.Tensor],
    non_trainable: Sequence[tf.Tensor],
    images: tf.Tensor,
    *,
    training: bool,
) -> tuple[tf.Tensor, list[tf.Tensor | None], list[tf.Tensor]]:
    """Computes a model's logits as a pure function of the variables' values.

    Args:
        model: A model made by `build_model`.
        trainable: Values of `model.trainable_variables`.
        non_trainable: Values of `model.non_trainable_variables`, such as batch
            statistics and the states of random generators.
        images: floating [batch, height, width, 3], with mean 0 and variance 1.
        training: Whether dropout and batch statistics are in training mode.

    Returns:
        logits: floating [batch, classes]; in evaluation at least float32.
        assigned: The values that layers assign to `written_variables(model)`; None for
            a variable that they leave as it is.
        penalties: Scalars to add to the loss, such as the weight decay.
    """
    values = [*non_trainable, *trainable]
    mapping = [*zip(written_variables(model), values, strict=True)]
    # Not `model.stateless_call`: without `__call__`, nested layers get no `training`.
    with Call(model, mapping) as scope:
        before = [scope.get_current_value(v) for v, _ in mapping]
        logits = model(images, training=training)
        after = [scope.get_current_value(v) for v, _ in mapping]
        penalties = list(map(tf.reduce_sum, scope.losses))  # From `add_loss`.
        # If the model is cut into sections, only the last one adds the weight decay.
        if not getattr(model, "recomputed", False):
            penalties += [
                variable.regularizer(scope.get_current_value(variable))
                for variable in model.trainable_variables
                if variable.regularizer
            ]
    pairs = zip(before, after, strict=True)
    assigned = [None if new is old else new for old, new in pairs]
    if not training and logits.dtype != tf.float64:
        logits = tf.cast(logits, tf.float32)
    return logits, assigned, penalties


def loss(
    logits: tf.Tensor,
    labels: tf.Tensor,
    penalties: Sequence[tf.Tensor],
    *,
    label_smoothing: float = 0.0,
    class_weights: np.ndarray | None = None,
) -> dict[str, tf.Tensor]:
    """Computes the loss of one batch and its terms, in float32 or float64.

    Args:
        logits: floating [batch, classes].
        labels: int32 [batch], or the fraction of each class, floating [batch, classes].
        penalties: Scalars to add to the loss.
        label_smoothing: Fraction of each label to spread evenly over all classes.
        class_weights: float64 [classes], factors for the cross entropies of each
            class's images. A mixed image has the weighted mean of its classes' factors.

    Returns:
        Scalars by name. Training minimizes `total_loss`: `cross_entropy`, the mean over
        the batch, plus `penalties`, the sum of the given ones. The others are means of
        `STEP_METRICS`, for which a mixed image has the class with the largest fraction.
    """
    if logits.dtype != tf.float64:
        logits = tf.cast(logits, tf.float32)
    if labels.dtype.is_floating:
        labels = tf.cast(labels, logits.dtype)
        entropies = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        label_classes = tf.argmax(labels, axis=1)
    else:
        # TensorFlow compares int32 on the host, even for labels on a GPU.
        label_classes = tf.cast(labels, tf.int64)
        if is_op_determinism_enabled():  # TensorFlow's gather takes 0.1 s to trace.
            chosen = tf.one_hot(labels, logits.shape[1], dtype=logits.dtype)
            logs = tf.math.multiply_no_nan(tf.nn.log_softmax(logits), chosen)
            entropies = -tf.reduce_sum(logs, axis=1)
        else:
            entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    if label_smoothing:
        to_all = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=1)
        entropies += label_smoothing * (to_all - entropies)
    if class_weights is not None:
        # Not divided by the sum of the batch's weights, which differs between towers.
        weights = tf.constant(class_weights, logits.dtype)
        if labels.dtype.is_floating:
            entropies *= tf.linalg.matvec(labels, weights)
        else:
            entropies *= tf.gather(weights, labels)
    cross_entropy = tf.reduce_mean(entropies)
    penalty = tf.zeros_like(cross_entropy)
    if penalties:
        penalty = tf.add_n([tf.cast(each, logits.dtype) for each in penalties])
    found = {"total_loss": cross_entropy + penalty, "cross_entropy": cross_entropy}
    found["penalties"] = penalty
    for name, one in STEP_METRICS.items():
        if one.compute:
            found[name] = tf.reduce_mean(one.compute(label_classes, logits))
    return found


def probe(model: keras.Model, image_shape: tuple[int, int, int]) -> list[float]:
    """Returns logits for fixed images, with fixed values of all variables.

    A run recognizes its model by these logits, which differ even between models whose
    variables have the same shapes. The list is empty if the logits are not finite, vary
    from call to call, or cannot be computed on the CPU.
    """
    shape = (_IMAGES, *image_shape)
    variables = model.trainable_variables, model.non_trainable_variables
    found = []
    try:
        with tf.device("/cpu:0"):  # GPUs round to TF32.
            images = _DEVIATION * tf.random.stateless_normal(shape, (0, 1))
            given, others = ([*map(_value, v, range(len(v)))] for v in variables)
            for _ in range(2):
                logits, *_ = inference(model, given, others, images, training=False)
                found.append(logits.numpy().astype(float).flat[:_LOGITS])
    except (tf.errors.OpError, RuntimeError):
        return []
    first, again = found
    is_fixed = np.isfinite(first).all() and np.allclose(first, again, 1e-3, 1e-3)
    return [float(f"{logit:.6g}") for logit in first] if is_fixed else []


def _value(variable: keras.Variable, index: int) -> tf.Tensor:
    shape, dtype = variable.shape, tf.as_dtype(variable.dtype)
    if not dtype.is_floating:  # Such as a generator's state.
        return tf.zeros(shape, dtype)
    noise = tf.random.stateless_normal(shape, (index, 0))
    if len(shape) < 2:
        return tf.cast(_OFFSET + _VARIATION * noise, dtype)
    return tf.cast(noise * math.sqrt(2.0 / max(1, math.prod(shape[:-1]))), dtype)
