"""A program's own loss and metrics, made fit for towers: checked, and of each image."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.config import augmentation
from cifar10.config.config import Config
from cifar10.errors import UsageError, reason

_TOLERANCE = 1e-4  # float32 rounds otherwise in batches of other sizes.


def of_each_image(loss: Any) -> Callable[..., tf.Tensor]:
    """Returns a loss as a function from labels and logits to the loss of each image.

    A `keras.losses.Loss` gets what Keras's `fit` would give it: labels in the type of
    the logits, and one-hot for those of Keras that are not called Sparse.
    """
    if not hasattr(loss, "get_config"):
        return loss
    kind = type(loss)
    is_keras = kind.__module__.partition(".")[0] == "keras"
    one_hot = is_keras and not kind.__name__.startswith("Sparse")

    def compute(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        if one_hot and labels.shape.rank == 1:
            labels = tf.one_hot(labels, logits.shape[-1])
        return loss.call(tf.cast(labels, logits.dtype), logits)

    return compute


def check_all(config: Config, classes: int) -> None:
    """Refuses a loss and metrics that N towers cannot compute as one does."""
    dtype = "float64" if config.network.precision == "float64" else "float32"
    if config.objects.loss:
        loss = of_each_image(config.objects.loss)
        is_mixed = augmentation.mixes(config.images.augmentation)
        check("loss", loss, classes, dtype, is_mixed=is_mixed)
    for name, metric in config.objects.metrics.items():
        check(f"metrics: {name}", metric, classes, dtype)


def check(
    what: str,
    function: Callable,
    classes: int,
    dtype: str = "float32",
    *,
    is_mixed: bool = False,
) -> None:
    """Refuses a function that N towers cannot compute as one does.

    Calls it on random labels, with `is_mixed` on parts of classes, and logits of some
    images, and on two parts of these. It may neither depend on other images of a batch
    nor on random numbers, nor have variables, which no step would train or save.
    """
    first = 3 if classes not in (3, 7) else 5
    count = first + 4  # Neither is the number of classes, so no shape fits by chance.
    random = np.random.default_rng(0)
    logits = tf.constant(random.normal(size=(count, classes)), dtype)
    labels = tf.constant(random.integers(0, classes, count), tf.int32)
    if is_mixed:
        labels = tf.constant(random.dirichlet(np.ones(classes), count), dtype)
    parts = slice(None), slice(first), slice(first, None)
    try:
        with tf.GradientTape() as tape:
            of_all, *of_parts = (function(labels[p], logits[p]) for p in parts)
        found = [np.asarray(one, np.float64) for one in (of_all, *of_parts)]
    except Exception as error:
        raise UsageError(
            f"{what}: it failed on labels {labels.dtype.name} {labels.shape} and "
            f"logits {logits.dtype.name}\n{logits.shape}: {reason(error)}"
        ) from error
    problem = ""
    if found[0].shape != (count,):
        problem = (
            f"for {count} images it returns the shape {found[0].shape}; return a "
            f"number for each, ({count},), as the towers average"
        )
    elif tape.watched_variables():
        problem = (
            "it has variables, which no step would train or save; put them into a "
            "layer of the model,\nwhich adds its loss by add_loss"
        )
    elif not np.allclose(found[0], np.concatenate(found[1:]), _TOLERANCE, _TOLERANCE):
        problem = (
            "what it returns for an image depends on other images of the batch, or on "
            "random numbers, so that\ntowers would not compute what one does"
        )
    if problem:
        raise UsageError(f"{what}: {problem}.")
