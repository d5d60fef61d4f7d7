"""The network of TensorFlow's CIFAR-10 tutorial.

It has two convolutions with pooling and local response normalization, two hidden dense
layers, and about a million parameters. Every constant comes from the tutorial.
"""

import keras
from keras import layers
from keras.initializers import Constant, TruncatedNormal

from cifar10.layers import LocalResponseNormalization, WeightDecay, logits_layer

# The tutorial adds weight_decay / 2 * sum(w^2) for the two hidden dense layers.
WEIGHT_DECAY = 0.004


def _initial(deviation: float, bias: float) -> dict[str, keras.Initializer]:
    kernel = TruncatedNormal(stddev=deviation)
    return {"kernel_initializer": kernel, "bias_initializer": Constant(bias)}


def _convolution(name: str, bias: float, **options: object) -> keras.Layer:
    options |= _initial(5e-2, bias)
    return layers.Conv2D(64, 5, padding="same", name=name, **options)


def _normalization(name: str) -> keras.Layer:
    return LocalResponseNormalization(
        depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75, name=name
    )


def _hidden(units: int, name: str) -> keras.Layer:
    options = {"kernel_regularizer": WeightDecay(WEIGHT_DECAY), **_initial(0.04, 0.1)}
    return layers.Dense(units, activation="relu", name=name, **options)


def build(image_shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Builds the tutorial's network, for images of zero mean and unit variance."""
    images = keras.Input(image_shape, name="images")
    net = _convolution("conv1", bias=0.0)(images)
    net = layers.MaxPooling2D(3, 2, padding="same", name="pool1")(net)
    # The tutorial applies ReLU before pooling. Either order gives the same values and
    # gradients, but after pooling ReLU has a quarter as many values to compute.
    net = layers.ReLU(name="relu1")(net)
    net = _normalization("norm1")(net)
    net = _convolution("conv2", bias=0.1, activation="relu")(net)
    net = _normalization("norm2")(net)
    net = layers.MaxPooling2D(3, 2, padding="same", name="pool2")(net)
    net = layers.Flatten(name="flatten")(net)
    net = _hidden(384, "local3")(net)
    net = _hidden(192, "local4")(net)
    values = TruncatedNormal(stddev=1 / 192.0)
    logits = logits_layer(classes, kernel_initializer=values, name="softmax_linear")
    return keras.Model(images, logits(net), name="tutorial")
