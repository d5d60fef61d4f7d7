"""A model whose graphs are traced in a fraction of the time of the tutorial's."""

import keras
import numpy as np
from keras import layers


def two_layers(image_shape, classes):
    """Returns a convolution and a dense layer, one of them with weight decay."""
    image = keras.Input(image_shape)
    net = layers.Conv2D(4, 5, strides=4, activation="relu", name="conv1")(image)
    net = layers.Flatten()(net)
    dense = layers.Dense(classes, kernel_regularizer="l2", name="softmax_linear")
    return keras.Model(image, dense(net))


def normalized(image_shape, classes):
    """Returns a convolution with batch norm and a dense layer."""
    image = keras.Input(image_shape)
    net = layers.Conv2D(4, 3, strides=2, name="conv1")(image)
    net = layers.Flatten()(layers.BatchNormalization()(net))
    return keras.Model(image, layers.Dense(classes, name="softmax_linear")(net))


def trapped(image_shape, classes):
    """Returns a dense layer whose loss is not finite for a white image."""
    image = keras.Input(image_shape)
    is_white = keras.ops.min(image, axis=[1, 2, 3], keepdims=True) > 2.0
    net = layers.Flatten()(keras.ops.where(is_white, np.inf, image))
    return keras.Model(image, layers.Dense(classes, name="softmax_linear")(net))


def of_three_dtypes(image_shape, classes):
    """Returns layers whose variables are of 16, 32 and 64 bits."""
    image = keras.Input(image_shape)
    net = layers.Conv2D(4, 5, strides=4, dtype="bfloat16", name="conv1")(image)
    net = layers.Dense(5, dtype="float64", name="hidden")(layers.Flatten()(net))
    return keras.Model(image, layers.Dense(classes, name="softmax_linear")(net))
