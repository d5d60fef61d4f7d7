"""A model of a golden training, given by name as a user's own would be."""

import keras
from keras import layers


def normalized(image_shape, classes):
    """Returns a small network with dropout and batch norm."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(8, 3, strides=2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(classes),
        ]
    )
