"""The activations of a model's layers, computed for TensorBoard apart from the step."""

from __future__ import annotations

import keras
import tensorflow as tf

from cifar10 import model as models
from cifar10.layers import QuickGelu

_ACTIVATION_LAYERS = (keras.layers.Activation, keras.layers.ReLU, QuickGelu)


class Activations:
    """Computes what the layers of the first tower return for its batch."""

    def __init__(self, model: keras.Model, device: str) -> None:
        self._device = device
        self._view = with_activations(model)
        self._compute = tf.function(self._trace, autograph=False)

    def __call__(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the activations by layer, with the variables as they are now.

        A training step with the same variables and batch computes the same ones,
        dropout masks included; nothing is written.

        Args:
            images: floating [batch, height, width, 3], as the model takes them.
        """
        return self._compute(images)

    def _trace(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        if self._view is None:
            return {}
        view, names = self._view
        with tf.device(self._device):
            outputs, _, _ = models.inference(
                view,
                [tf.identity(v.value) for v in view.trainable_variables],
                [tf.identity(v.value) for v in view.non_trainable_variables],
                images,
                training=True,
            )
        return dict(zip(names, outputs[1:], strict=True))


def with_activations(model: keras.Model) -> tuple[keras.Model, list[str]] | None:
    """Returns a view of a model that also returns its layers' activations.

    Its outputs are the logits and then those of the layers that have weights or are
    activations, whose names come with it. None for a model that is not a graph of
    layers: Keras does not know its inner tensors.
    """
    if not models.is_graph(model):
        return None
    layers = [
        layer
        for layer in model.layers
        if not isinstance(layer, keras.Model)  # Its output belongs to its own inputs.
        and (layer.weights or isinstance(layer, _ACTIVATION_LAYERS))
    ]
    outputs = [model.outputs[0], *(layer.output for layer in layers)]
    inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
    return keras.Model(inputs, outputs), [layer.name for layer in layers]
