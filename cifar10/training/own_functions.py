"""Adds a user's own loss and metrics to what a tower computes."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10.config import augmentation, fields
from cifar10.config.config import ResolvedConfig
from cifar10.config.run_config import COMPUTED
from cifar10.errors import UsageError
from cifar10.model import inference
from cifar10.models import custom, layer_tree
from cifar10.towers.copies import read_variables
from cifar10.towers.towers import TowerBuilder

_IMAGES, _TOLERANCE = 64, 1e-4  # The tolerance suits float32.
_FEW, _ROUGHLY = 4, 0.25  # For penalties, in spite of dropout. Sums are off by half.


def synchronized(model: keras.Model) -> list[str]:
    """Returns the names of the layers that share statistics among replicas."""
    layers = layer_tree.layers(model)
    return [layer.name for layer in layers if getattr(layer, "synchronized", False)]


def check_model(
    model: keras.Model, image_shape: Sequence[int], sharing: int, batches: int
) -> None:
    """Refuses a model whose training would depend on the number of towers.

    `sharing` towers share variables, and an update is of `batches` batches.
    """
    if sharing > 1 and (names := synchronized(model)):
        raise UsageError(
            f"Layer {names[0]} has synchronized=True, but towers that share variables "
            "compute statistics of their own images. Give --variable_update mirrored."
        )
    regularized = sum(bool(one.regularizer) for one in model.trainable_variables)
    trained, others = read_variables(model)
    images = tf.random.stateless_normal((2 * _FEW, *image_shape), (0, 0))

    def added(images: tf.Tensor, *, training: bool) -> list[float]:
        *_, penalties = inference(model, trained, others, images, training=training)
        return [float(one) for one in penalties[: len(penalties) - regularized]]

    if batches == 1 or not added(images[:2], training=True):
        return
    # Batch norm sees the same images in equal halves, and none of them in evaluation.
    for batch, training in (tf.concat([images[:_FEW]] * 2, 0), True), (images, False):
        whole = sum(added(batch, training=training))
        halves = [sum(added(part, training=training)) for part in tf.split(batch, 2)]
        if not np.isclose(whole, np.mean(halves), _ROUGHLY, _TOLERANCE):
            raise UsageError(
                "add_loss() of the model has to add a mean over the images of a batch, "
                f"so that towers can divide it. In a test it was {whole:.6g} for a "
                f"batch, and {np.mean(halves):.6g} as the mean of its halves."
            )


def with_own(
    compute: Callable, own: fields.Loss, classes: int, precision: str, mixed: bool
) -> Callable:
    """Returns the function `compute`, extended by the user's loss and metrics.

    If images are `mixed`, each label is a vector of class fractions. Refuses a loss or
    metric that would depend on the number of towers.
    """

    def loss(logits: tf.Tensor, labels: tf.Tensor, penalties: Any) -> dict:
        found = compute(logits, labels, penalties)
        logits = tf.cast(logits, found["total_loss"].dtype)
        if callable(own.loss):
            expected = _expected(own.loss, labels, logits)
            mean = _mean("total_loss", own.loss, expected, logits)
            found["total_loss"] = mean + found["penalties"]
        if labels.dtype.is_floating:
            labels = tf.argmax(labels, axis=1)
        for name, metric in (own.metrics or {}).items():
            found[name] = _mean(name, metric, labels, logits)
        return found

    _check_divisible(loss, own, classes, precision, mixed)
    return loss


def _check_divisible(
    loss: Callable, own: fields.Loss, classes: int, precision: str, mixed: bool
) -> None:
    """Refuses a loss or metric that would depend on the number of towers."""
    random = np.random.default_rng(0)
    dtype = tf.float64 if precision == "float64" else tf.float32
    logits = tf.constant(random.normal(size=(_IMAGES, classes)), dtype)
    indices = tf.constant(random.integers(0, classes, _IMAGES))
    labels = tf.one_hot(indices, classes) if mixed else indices
    expected = _expected(own.loss, labels, logits)
    parts = zip(tf.split(logits, 2), tf.split(labels, 2), strict=True)
    whole, halves = loss(logits, labels, []), [loss(*part, []) for part in parts]
    graph = tf.function(loss, autograph=False)  # As in a training step.
    variables = graph.get_concrete_function(logits, labels, []).graph.variables
    for name, value in whole.items():
        of_halves = np.mean([half[name] for half in halves])
        if not np.isfinite(value):
            raise UsageError(
                f"{name} is {value:g} for random logits. Make it finite, for example "
                "with tf.math.softplus in place of a logarithm."
            )
        is_mean = np.isclose(value, of_halves, _TOLERANCE, _TOLERANCE)
        if not is_mean or variables:
            given = indices if name != "total_loss" else expected
            raise UsageError(
                f"{name}: a loss or metric has to be one value per image, or the mean "
                "of such values, without random numbers or variables, so that towers "
                f"can divide a batch. In a test it was {value:.6g} for a batch, and "
                f"{of_halves:.6g} as the mean of its halves. It gets labels "
                f"{tuple(given.shape)} and logits {tuple(logits.shape)}."
            )
    if callable(own.loss):
        _check_loss(own.loss, expected, indices, logits)


def _check_loss(
    loss: Callable, expected: tf.Tensor, indices: tf.Tensor, logits: tf.Tensor
) -> None:
    """Refuses a loss that takes its logits or labels for something else."""
    own = tf.one_hot(indices, logits.shape[1], dtype=logits.dtype)

    def has_slope(logits: tf.Tensor) -> bool:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            value = _mean("total_loss", loss, expected, logits)
        slope = tape.gradient(value, logits, unconnected_gradients="zero")
        return bool(tf.math.count_nonzero(slope))

    def reads(labels: tf.Tensor) -> bool:
        pair = labels, tf.roll(labels, 1, axis=0)
        with contextlib.suppress(UsageError):
            one, other = (_mean("total_loss", loss, each, logits) for each in pair)
            return not np.isclose(one, other, _TOLERANCE, _TOLERANCE)
        return False

    # Images are wrong, and right: a robust loss may ignore the former, or a margin the
    # latter. A loss of 0, beside those of add_loss(), has no slope anywhere.
    beyond = 1.1 - 1.2 * own, (1.2 + float(np.log(own.shape[1]))) * own - 0.1
    if has_slope(logits) and not any(map(has_slope, beyond)):
        raise UsageError(
            "The loss has no gradient for logits below 0 or above 1: it takes "
            "probabilities. Compute these by tf.nn.softmax, or give from_logits=True."
        )
    if not reads(expected) and reads(indices):
        raise UsageError(
            "The loss reads labels as whole numbers, but gets one part for each class, "
            "as in one-hot labels. Read these, or let its class be named Sparse...."
        )


def of_code(config: ResolvedConfig, towers: TowerBuilder, classes: int) -> dict:
    """Returns what a user's code makes, and computes from fixed values, by names."""
    found: dict[str, tf.Tensor] = {}
    if config.loss.loss or config.loss.metrics:
        dtype = tf.float64 if config.network.precision == "float64" else tf.float32
        labels = tf.range(_IMAGES, dtype=tf.int64) % classes
        if augmentation.mixes(config.images.augmentation):
            labels = tf.one_hot(labels, classes)
        with tf.device("/cpu:0"):  # GPUs round to TF32.
            logits = tf.random.stateless_normal((_IMAGES, classes), (0, 0), dtype=dtype)
            found = towers.tower.loss(logits, labels, [])
    state = towers.state
    made = [  # Without the numbers that Keras appends, which the process decides.
        (one.dtype, (*one.shape,), re.sub(r"_\d+", "", one.path))
        for one in (*state.model.variables, *state.optimizer.variables)
    ]
    digest = hashlib.sha256(repr(made).encode()).hexdigest()
    return {
        "metrics": sorted(config.loss.metrics or ()),
        "variables made by the code of --model or --optimizer": digest[:8],
        **{f"{COMPUTED}{name}": [float(found[name])] for name in found},
    }


def check_schedule(rate_of: Callable, steps: int, highest: float = np.inf) -> None:
    """Refuses a schedule with state, or with a rate below 0 or above `highest`."""
    with custom.explained("learning_rate of Config", "the schedule failed"):
        graph = tf.function(rate_of, autograph=False)
        traced = graph.get_concrete_function(tf.TensorSpec([], tf.int64))
        for step in np.linspace(0, steps - 1, 100).astype(np.int64):
            rate, again = (float(traced(tf.constant(step))) for _ in range(2))
            why = ""
            if not 0.0 <= rate < np.inf:
                why = f"it is {rate:g} at step {step}. Give 0.0 or more"
            elif rate != again:
                why = "no checkpoint holds a schedule's state. Use the step alone"
            elif rate > highest * (1.0 + _TOLERANCE):
                why = f"it is {rate:g} at step {step}, but muon needs a schedule whose "
                why += f"initial_learning_rate, here {highest:g}, is its highest"
            if why:
                raise UsageError(f"learning_rate: {why}.")


def _mean(name: str, of: Callable, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean of what a user's function returns; refuses nonsense."""
    shapes = f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)}"
    with custom.explained(name, f"it failed on {shapes}"):
        values = of(labels, logits)
    try:
        return tf.reduce_mean(tf.cast(values, logits.dtype))
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise UsageError(
            f"{name}: the function returned {values!r}, which is not a number for each "
            "image. Return a tensor of such numbers, or their mean."
        ) from error


def _expected(loss: Any, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns one-hot labels for a Keras loss that is not sparse, or else `labels`."""
    names = [kind.__name__ for kind in type(loss).__mro__]
    is_sparse = any(name.startswith(("Sparse", "Circle")) for name in names)
    if hasattr(loss, "get_config") and not is_sparse and labels.dtype.is_integer:
        return tf.one_hot(labels, logits.shape[-1])
    return labels
