"""The model: inference, loss, and which architectures there are.

A model is any Keras model from images to logits. It is built once, with its variables
on the CPU; the towers then call `inference` with the variables' values, and it neither
reads nor writes anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar10.models import airbench, custom, resnet, tutorial

REGISTRY: dict[str, custom.Builder] = {
    "airbench": airbench.build,
    "resnet": resnet.build,
    "tutorial": tutorial.build,
}

# What a model's function may take besides.
OPTIONS = ("depth", "width")

# Models with variables that are not drawn at random but computed from training images.
_INITIALIZERS = {"airbench": airbench.initialize}

# Images that such a computation looks at, as in airbench.
_INITIALIZING_IMAGES = 5000


def build(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    precision: str = "float32",
    seed: int | None = 0,
    device: str = "/cpu:0",
    options: Mapping[str, int | None] | None = None,
) -> keras.Model:
    """Builds a model.

    Args:
        name: A name in `REGISTRY`, or `module:function` for a function of yours that
            takes (image_shape, classes) and returns a Keras model, or a list of them,
            each for what the one before returns; they are its sections.
        image_shape: Height, width and channels of one image.
        classes: Number of classes.
        precision: Type of the arithmetic, as in `towers/precision.py` but `auto`. The
            variables are float32, or float64 with it.
        seed: Seed of the initial values, and from here on of all that the process
            draws at random; None leaves both to what the process has drawn before.
        device: Where the variables live.
        options: Further arguments of the function, of those in `OPTIONS`; None, or
            one that is None, for its own.

    Returns:
        A model from images, [batch, *image_shape], to logits, [batch, classes].

    Raises:
        UsageError: The name is unknown or the function does not return such a model.
    """
    given = {key: value for key, value in (options or {}).items() if value}
    builder = REGISTRY.get(name) or custom.find(name, REGISTRY)
    custom.check_arguments(name, builder, given)
    earlier_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(_policy(precision))
    if seed is not None:
        keras.utils.set_random_seed(seed)
    try:
        with tf.device(device):
            model = builder(image_shape, classes, **given)
            if isinstance(model, list):
                model = custom.chained(name, image_shape, model)
            custom.check(name, model, image_shape, classes)
    finally:
        keras.config.set_dtype_policy(earlier_policy)
    return model


def initialize(
    model: keras.Model,
    name: str,
    images: np.ndarray,
    prepare: Callable[[np.ndarray], tf.Tensor],
) -> None:
    """Sets the variables that a model computes from training images, if it has such.

    Args:
        model: A model made by `build`.
        name: The name that it was built by.
        images: uint8 [count, height, width, 3], the training set.
        prepare: Makes of such images what the model takes, without distortions.
    """
    if name in _INITIALIZERS:
        _INITIALIZERS[name](model, prepare(images[:_INITIALIZING_IMAGES]))


def inference(
    model: keras.Model,
    trainable: Sequence[tf.Tensor],
    non_trainable: Sequence[tf.Tensor],
    images: tf.Tensor,
    *,
    training: bool,
) -> tuple[tf.Tensor, list[tf.Tensor | None], list[tf.Tensor]]:
    """Computes logits as a pure function of the variables' values.

    Args:
        model: A model made by `build`.
        trainable: Values of `model.trainable_variables`.
        non_trainable: Values of `model.non_trainable_variables`: batch statistics and
            the state of random generators.
        images: floating [batch, height, width, 3], zero mean and unit variance.
        training: Whether dropout and batch statistics are in training mode.

    Returns:
        logits: floating [batch, classes].
        non_trainable: The values that the non-trainable variables should take next;
            None for those that stay as they are.
        penalties: Scalars that the model adds to its loss: its weight decay.
    """
    mapping = [
        *zip(model.trainable_variables, trainable, strict=True),
        *zip(model.non_trainable_variables, non_trainable, strict=True),
    ]
    # Not `model.stateless_call`: it bypasses `__call__`, and with it the layers that
    # take `training` from the call around them.
    with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
        before = [scope.get_current_value(v) for v in model.non_trainable_variables]
        # Keras knows penalties by their ids, and of earlier graphs' some come again.
        model._clear_losses()  # noqa: SLF001 - there is no public way.
        logits = model(images, training=training)
        penalties = list(model.losses)
    after = [scope.get_current_value(v) for v in model.non_trainable_variables]
    changed = [
        None if new is old else new for old, new in zip(before, after, strict=True)
    ]
    return logits, changed, penalties


def evaluation_logits(
    model: keras.Model,
    trainable: Sequence[tf.Tensor],
    non_trainable: Sequence[tf.Tensor],
    images: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes what an evaluation scores, as a pure function of the variables' values.

    Args:
        model: A model made by `build`.
        trainable: Values of `model.trainable_variables`.
        non_trainable: Values of `model.non_trainable_variables`.
        images: floating [batch, height, width, channels], as the model takes them.

    Returns:
        Logits, in float32 or better, and the model's penalties.
    """
    logits, _, penalties = inference(
        model, trainable, non_trainable, images, training=False
    )
    if logits.dtype != tf.float64:
        logits = tf.cast(logits, tf.float32)
    return logits, penalties


def loss(
    logits: tf.Tensor,
    labels: tf.Tensor,
    penalties: Sequence[tf.Tensor],
    *,
    label_smoothing: float = 0.0,
) -> dict[str, tf.Tensor]:
    """Computes the loss of one batch and its parts, in float32 or better.

    Args:
        logits: floating [batch, classes].
        labels: int32 [batch].
        penalties: Scalars that the model adds to its loss.
        label_smoothing: Part of each label that is spread evenly over all classes.

    Returns:
        Scalars by name. `total_loss`, which is minimized, is `cross_entropy`, the mean
        over the batch, plus `weight_decay`. `precision @ 1` is the part of the
        batch whose largest logit is the label's.
    """
    if logits.dtype != tf.float64:
        logits = tf.cast(logits, tf.float32)
    cross_entropy = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
    if label_smoothing:
        to_all = -tf.reduce_mean(tf.nn.log_softmax(logits))
        cross_entropy += label_smoothing * (to_all - cross_entropy)
    weight_decay = (
        tf.cast(tf.add_n(list(penalties)), logits.dtype)
        if penalties
        else tf.zeros_like(cross_entropy)
    )
    predictions = tf.argmax(logits, axis=1, output_type=labels.dtype)
    return {
        "total_loss": cross_entropy + weight_decay,
        "cross_entropy": cross_entropy,
        "weight_decay": weight_decay,
        "precision @ 1": tf.reduce_mean(tf.cast(predictions == labels, logits.dtype)),
    }


def is_graph(model: keras.Model) -> bool:
    """Tells whether Keras knows what a model's layers give to one another."""
    image = keras.Input([1])
    # A subclass may compute something else than its graph of layers.
    return type(model) in (keras.Sequential, type(keras.Model(image, image)))


def _policy(precision: str) -> str:
    """Returns the name of Keras's dtype policy for a precision."""
    return f"mixed_{precision}" if precision in ("bfloat16", "float16") else precision
