"""The network of Keller Jordan's airbench94, which quickly reaches 94 % on CIFAR-10.

It consists of a fixed whitening convolution, three groups of two 3 x 3 convolutions
with batch norm, and a linear head. Constants come from airbench94_muon.py
(https://github.com/KellerJordan/cifar10-airbench) unless a comment says otherwise.

With `width` 128 and `depth` 3 (convolutions per group) it is airbench96.py's network,
which reaches 96 %. Each group then has a shortcut around its last two convolutions.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import KerasTensor, layers

from cifar10.errors import UsageError
from cifar10.layers import FusedBatchNormalization, QuickGelu, WideConv2D, logits_layer

_WHITENING_SIDE = 2
_WHITENING = "whitening"

# From this many output channels on, `WideConv2D` is faster.
_WIDE = 256

# Keeps directions of little variance from being amplified without limit.
_LEAST_VARIANCE = 5e-4

# The whitening filters are computed from at most this many pixels: 5,000 images of
# 32 x 32. The limit keeps large images from taking gigabytes of memory.
_INITIALIZING_PIXELS = 5000 * 32 * 32


def _identity_values(shape: tuple[int, ...], dtype: object = None) -> tf.Tensor:
    """Returns filters that copy each input channel; others get PyTorch's defaults."""
    height, width, inputs, outputs = shape
    bound = (height * width * inputs) ** -0.5
    values = keras.random.uniform(shape, -bound, bound, dtype=dtype)
    copied = min(inputs, outputs)
    identity = np.zeros((height, width, inputs, copied))
    identity[height // 2, width // 2, range(copied), range(copied)] = 1.0
    return tf.concat([tf.cast(identity, values.dtype), values[..., copied:]], axis=-1)


def _head_values(shape: tuple[int, int], dtype: object = None) -> tf.Tensor:
    """Returns uniform random values of unit variance, for the head's weights."""
    return keras.random.uniform(shape, -(3.0**0.5), 3.0**0.5, dtype=dtype)


def _convolution(inputs: KerasTensor, width: int, name: str) -> KerasTensor:
    options = {"kernel_initializer": _identity_values, "name": name}
    if width >= _WIDE:
        return WideConv2D(width, **options)(inputs)
    return layers.Conv2D(width, 3, padding="same", use_bias=False, **options)(inputs)


def _normalization(name: str) -> keras.Layer:
    return FusedBatchNormalization(momentum=0.6, epsilon=1e-12, scale=False, name=name)


def _group(net: KerasTensor, width: int, depth: int, group: int) -> KerasTensor:
    """Adds a group of convolutions, with pooling of 2 x 2 after the first of them."""
    net = _convolution(net, width, f"conv{group}a")
    net = layers.MaxPooling2D(2, name=f"pool{group}")(net)
    net = _normalization(f"norm{group}a")(net)
    net = first = QuickGelu(name=f"gelu{group}a")(net)
    for letter in "bc"[: depth - 1]:
        net = _convolution(net, width, f"conv{group}{letter}")
        net = _normalization(f"norm{group}{letter}")(net)
        if letter == "c":
            net = layers.Add(name=f"sum{group}")([net, first])
        net = QuickGelu(name=f"gelu{group}{letter}")(net)
    return net


def build(
    image_shape: tuple[int, int, int], classes: int, *, depth: int = 2, width: int = 64
) -> keras.Model:
    """Builds the network for standardized images of at least 9 x 9 pixels.

    `depth` is the number of convolutions in each group, `width` the number of filters
    in the first group. Call `initialize` afterwards to set the whitening filters.
    """
    if depth not in (2, 3):
        raise UsageError(f"--depth {depth}: give 2 or 3, the convolutions per group.")
    patch = _WHITENING_SIDE**2 * image_shape[-1]
    images = keras.Input(image_shape, name="images")
    whitening = layers.Conv2D(
        2 * patch,
        _WHITENING_SIDE,
        bias_initializer=keras.initializers.RandomUniform(-(patch**-0.5), patch**-0.5),
        # Full precision, because whitening amplifies rounding errors up to 40 times.
        dtype=keras.config.dtype_policy().variable_dtype,
        name=_WHITENING,
    )
    net = QuickGelu(name="gelu0")(whitening(images))
    whitening.kernel.trainable = False
    for group, filters in enumerate((width, 4 * width, 4 * width), 1):
        net = _group(net, filters, depth, group)
    net = layers.GlobalMaxPooling2D(name="pool4")(net)
    net = layers.Rescaling(1 / (4 * width), name="scale")(net)
    options = {"use_bias": False, "kernel_initializer": _head_values, "name": "head"}
    return keras.Model(images, logits_layer(classes, **options)(net), name="airbench")


def initialize(
    model: keras.Model, images: Any, prepare: Callable[[np.ndarray], tf.Tensor]
) -> None:
    """Sets the filters of the first convolution to whiten patches of images.

    The filters are the principal directions, scaled for outputs of unit variance, and
    the same filters negated. `Architecture.initialize` documents the arguments.
    """
    _, height, width, _ = images.shape
    count = min(max(1, _INITIALIZING_PIXELS // (height * width)), len(images))
    # Spread over the set, because the first images of a folder are of a single class.
    chosen = np.arange(count) * len(images) // count
    side = _WHITENING_SIDE
    patches = tf.image.extract_patches(
        prepare(images[chosen]), [1, side, side, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID"
    )
    flat = tf.reshape(patches, [-1, patches.shape[-1]]).numpy().astype(np.float64)
    variances, directions = np.linalg.eigh(flat.T @ flat / len(flat))
    filters = directions / np.sqrt(variances + _LEAST_VARIANCE)
    kernel = model.get_layer(_WHITENING).kernel
    kernel.assign(np.concatenate([filters, -filters], axis=1).reshape(kernel.shape))
