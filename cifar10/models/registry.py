"""The architectures: their names, and how a model is built."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.models import (
    airbench,
    applications,
    custom,
    failures,
    names,
    resnet,
    tutorial,
)

REGISTRY: dict[str, custom.Builder] = {
    "airbench": airbench.build,
    "resnet": resnet.build,
    "tutorial": tutorial.build,
}

# Further arguments that a model's function may take.
OPTIONS = ("depth", "width")

# Of a parameter and its moving average, in float32.
_BYTES = 8

# Pixels of the images that airbench94 computes its first filters from: 5,000 of 32 x
# 32. Fewer images are enough if they are larger, and do not take gigabytes.
_INITIALIZING_PIXELS = 5000 * 32 * 32


def find(name: str) -> custom.Builder:
    """Returns the function that builds the model of this name."""
    if names.of_application(name):
        return applications.find(name)
    return REGISTRY.get(name) or custom.find(name)


def build(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    precision: str = "float32",
    seed: int | None = 0,
    device: str = "/cpu:0",
    options: Mapping[str, int | None] | None = None,
    room: int | None = None,
) -> keras.Model:
    """Builds a model.

    Args:
        name: A name in `REGISTRY`, `applications:NAME` for one of Keras's, or
            `module:function` for a function of yours that takes (image_shape, classes)
            and returns a Keras model, or a list of models, each of which takes what the
            one before returns; they are its sections.
        image_shape: Height, width and channels of one image.
        classes: Number of classes.
        precision: Type of the arithmetic, as in `towers/precision.py` except `auto`.
            The variables are float32, or float64 if that is the precision.
        seed: Seed of the initial values, and from here on of all that the process
            draws at random; None leaves both to what the process has drawn before.
        device: Where the variables live.
        options: Further arguments of the function, from `OPTIONS`; None, or a value
            of None, for the function's defaults.
        room: Bytes that are free; None if that is not known.

    Returns:
        A model from images, [batch, *image_shape], to logits, [batch, classes].

    Raises:
        UsageError: The name is unknown, there is no room for what `options` ask for, or
            the function does not return such a model.
    """
    given = {key: value for key, value in (options or {}).items() if value}
    builder = find(name)
    custom.check_arguments(name, builder, given)
    if given and name in REGISTRY and room is not None:
        _check_room(lambda: builder(image_shape, classes, **given), given, room)
    earlier_policy = keras.config.dtype_policy()
    mixed = precision in ("bfloat16", "float16")
    keras.config.set_dtype_policy(f"mixed_{precision}" if mixed else precision)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    try:
        with tf.device(device):
            called = f"called with image_shape={image_shape}, classes={classes}"
            with failures.explained(name, f"the function failed,\n{called}"):
                model = builder(image_shape, classes, **given)
                if isinstance(model, list):
                    model = custom.chained(name, image_shape, model)
            custom.check(name, model, image_shape, classes)
    finally:
        keras.config.set_dtype_policy(earlier_policy)
    return model


def _check_room(build: Callable[[], keras.Model], given: Mapping, room: int) -> None:
    """Refuses a model that does not fit into `room` bytes, without allocating it."""

    def count_parameters() -> int:
        # Variables have shapes there, but no values.
        with keras.StatelessScope(initialize_variables=False):
            return build().count_params()

    # Keras keeps a list for each thread of variables that wait for their values, which
    # they would get at the end of the next scope.
    with ThreadPoolExecutor(1) as thread:
        count = thread.submit(count_parameters).result()
    if count * _BYTES > room:
        flags = " ".join(f"--{option} {value}" for option, value in given.items())
        raise UsageError(
            f"{flags}: the model has {count:,} parameters.\nThey and their averages "
            f"take {count * _BYTES / 1e9:,.0f} GB, and {room / 1e9:,.1f} GB of memory "
            "are free. Give a smaller number."
        )


def initialize(
    model: keras.Model,
    name: str,
    images: Any,
    prepare: Callable[[np.ndarray], tf.Tensor],
) -> None:
    """Sets the variables that a model computes from training images, if it has such.

    `images` is the training set, uint8 [count, height, width, channels], an array or
    something that becomes one when indexed; `prepare` turns such images into what the
    model takes, without distortions.
    """
    if name == "airbench":
        _, height, width, _ = images.shape
        most = max(1, _INITIALIZING_PIXELS // (height * width))
        count = min(most, len(images))
        # From all parts of the set: in a folder the first ones are of a single class.
        chosen = np.arange(count) * len(images) // count
        airbench.initialize(model, prepare(images[chosen]))


def is_graph(model: keras.Model) -> bool:
    """Returns whether Keras knows how a model's layers are connected."""
    image = keras.Input([1])
    # A subclass may compute something other than its graph of layers.
    return type(model) in (keras.Sequential, type(keras.Model(image, image)))
