"""The activations of a model's layers, computed for TensorBoard apart from the step."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.layers import QuickGelu
from cifar10.models import registry
from cifar10.towers.tracing import traced
from cifar10.training.histograms import sample

_ACTIVATION_LAYERS = (keras.layers.Activation, keras.layers.ReLU, QuickGelu)


def activations_of(
    model: keras.Model, device: str
) -> Callable[[tf.Tensor], dict[str, np.ndarray]]:
    """Returns a function from images, as the model takes them, to its activations.

    It returns samples of them by layer, once they are computed from the variables as
    they are then. A training step of the first tower computes the same activations,
    dropout masks included; nothing is written.
    """
    computed = traceable(model, device)
    return lambda images: {
        name: sample(values).numpy() for name, values in computed(images).items()
    }


def traceable(
    model: keras.Model, device: str
) -> tf.types.experimental.PolymorphicFunction:
    """Returns the function that computes all activations by layer."""
    viewed = with_activations(model)

    def compute(images: tf.Tensor) -> dict[str, tf.Tensor]:
        if viewed is None:
            return {}
        view, names = viewed
        with tf.device(device):
            outputs, _, _ = models.inference(
                view,
                [tf.identity(v.value) for v in view.trainable_variables],
                [tf.identity(v.value) for v in view.non_trainable_variables],
                images,
                training=True,
            )
        return dict(zip(names, outputs[1:], strict=True))

    return traced(compute)


def with_activations(model: keras.Model) -> tuple[keras.Model, list[str]] | None:
    """Returns a view of a model that also returns its layers' activations.

    Its outputs are the logits and then those of the layers that have weights or are
    activations, whose names come with it; as in the tutorial, that of a convolution
    before max pooling and ReLU is shown after ReLU and before the pooling. A layer that
    another model had first is left out, since Keras gives its output there. None for a
    model that is not a graph of layers: Keras does not know its inner tensors.
    """
    if not registry.is_graph(model):
        return None
    layers = [
        layer
        for layer in model.layers
        if not isinstance(layer, keras.Model)  # Its output belongs to its own inputs.
        and (layer.weights or isinstance(layer, _ACTIVATION_LAYERS))
    ]
    inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
    if not _are_connected(inputs, layers):
        layers = [layer for layer in layers if _are_connected(inputs, [layer])]
    outputs = [model.outputs[0], *(_activated(layer, model) for layer in layers)]
    view = keras.Model(inputs, outputs)
    view.input_spec = model.input_spec  # The sizes of images that it takes.
    return view, [layer.name for layer in layers]


def _are_connected(inputs: Any, layers: Sequence[keras.layers.Layer]) -> bool:
    """Returns whether Keras finds a way from a model's inputs to layers' outputs."""
    try:
        keras.Model(inputs, [layer.output for layer in layers])
    except ValueError:
        return False
    return True


def _activated(layer: keras.layers.Layer, model: keras.Model) -> keras.KerasTensor:
    """Returns a layer's output, after ReLU where that comes next but for a pooling."""
    following = {id(one.input): one for one in model.layers}
    pooling = following.get(id(layer.output))
    if isinstance(pooling, keras.layers.MaxPooling2D) and isinstance(
        following.get(id(pooling.output)), keras.layers.ReLU
    ):
        return keras.ops.relu(layer.output)  # The maximum of both orders is the same.
    return layer.output
