"""Rebuilds a model from only Keras's layers, so that its file needs no other package.

A `.keras` file names the classes of its layers, and only Keras's own are found wherever
Keras is installed. Each layer of this package computes what some layers of Keras
compute, in float32 up to rounding, only faster in training. LiteRT can also compute all
of Keras's layers used here in integers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from cifar10 import layers as ours
from cifar10.models import registry
from cifar10.tools.export import preparation

# Layers that differ in how they are trained, not in what they compute.
_FASTER = {
    ours.FusedBatchNormalization: keras.layers.BatchNormalization,
    ours.NewSection: keras.layers.Identity,
    ours.WideConv2D: keras.layers.Conv2D,
}
# What a layer's configuration has only for training; it may be a class of ours.
_FOR_TRAINING = ("_initializer", "_regularizer", "_constraint")


def build(model: keras.Model, description: Mapping[str, Any]) -> keras.Model:
    """Returns a model with the input and output that an export's description names.

    Args:
        model: A float32 model of Keras's functional or sequential kind.
        description: As in `formats.write`.

    Raises:
        ValueError: As by `rebuild`.
    """
    rebuilt = rebuild(model)
    if not description["with_preprocessing"]:
        return rebuilt
    signature = {**description["input"], "shape": description["input"]["shape"][1:]}
    images = keras.Input(**signature)
    shape = tuple(description["picture_shape"])
    logits = rebuilt(preparation.prepare(images, shape, description["distortions"]))
    probabilities = keras.layers.Softmax(name="probabilities")(logits)
    return keras.Model(images, probabilities, name="cifar10")


def rebuild(model: keras.Model) -> keras.Model:
    """Returns a copy of a model, with layers of Keras in place of this package's.

    Raises:
        ValueError: The model is of another kind, or has a layer of a user's own.
    """
    if not registry.is_graph(model):
        raise ValueError(
            f"it is a {type(model).__qualname__}, whose call is Python code"
        )
    copies = []

    def copy(layer: keras.Operation) -> keras.Operation:
        if not isinstance(layer, keras.layers.Layer):  # Of a graph: one of keras.ops.
            return layer
        if type(layer) in _COMPOSED:
            return _COMPOSED[type(layer)](layer)
        kind = _FASTER.get(type(layer), type(layer))
        if kind.__module__.partition(".")[0] != "keras":
            raise ValueError(
                f"its layer {layer.name} is of the class {kind.__module__}."
                f"{kind.__qualname__}, and Keras alone opens only its own"
            )
        config = {
            key: value
            for key, value in layer.get_config().items()
            if not key.endswith(_FOR_TRAINING)
        }
        copies.append((layer, kind.from_config(config)))
        return copies[-1][1]

    rebuilt = keras.models.clone_model(model, clone_function=copy, recursive=True)
    for layer, same in copies:
        same.set_weights(layer.get_weights())
    if isinstance(rebuilt, keras.Sequential):
        # Without its own Input it would take as many images as it was built with.
        images = keras.Input(model.input_shape[1:], name="images")
        rebuilt = keras.Sequential([images, *rebuilt.layers], name=model.name)
    return rebuilt


def _local_response_normalization(
    layer: ours.LocalResponseNormalization,
) -> keras.Model:
    """Returns x * s^-beta, where a 1 x 1 convolution of x^2 computes the energy s."""
    inputs = _input_of(layer)
    channels = inputs.shape[-1]
    window = keras.layers.Conv2D(channels, 1, trainable=False, name="energy")
    energy = window(keras.layers.Multiply()([inputs, inputs]))
    places = np.arange(channels)
    near = abs(places[:, None] - places) <= layer.depth_radius
    window.set_weights([layer.alpha * near[None, None], np.full(channels, layer.bias)])
    if layer.beta == 0.75:
        # LiteRT has an integer kernel of the reciprocal root, and none of powers.
        root = keras.ops.rsqrt(energy)
        fourth_root = keras.ops.rsqrt(keras.layers.Multiply()([energy, root]))
        power = keras.layers.Multiply()([root, fourth_root])
    else:
        power = keras.ops.power(energy, -layer.beta)
    outputs = keras.layers.Multiply()([inputs, power])
    return keras.Model(inputs, outputs, name=layer.name)


def _quick_gelu(layer: ours.QuickGelu) -> keras.Model:
    """Returns x * sigmoid(slope * x), which is silu(slope * x) / slope."""
    return keras.Sequential(
        [
            _input_of(layer),
            keras.layers.Rescaling(ours.GELU_SLOPE),
            keras.layers.Activation("silu"),
            keras.layers.Rescaling(1 / ours.GELU_SLOPE),
        ],
        name=layer.name,
    )


def _input_of(layer: keras.layers.Layer) -> keras.KerasTensor:
    _, *shape = layer.get_build_config()["input_shape"]
    return keras.Input(shape)


_COMPOSED: dict[type, Callable[[Any], keras.Model]] = {
    ours.LocalResponseNormalization: _local_response_normalization,
    ours.QuickGelu: _quick_gelu,
}
