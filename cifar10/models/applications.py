"""The networks of `keras.applications`, for images that this package standardized.

The published weights were trained on images that Keras's `preprocess_input` scaled. So
each model turns standardized images back into pixels, for its `preprocess_input`.
"""

import functools
import inspect
import sys
import warnings
from typing import Any

import keras
import numpy as np

from cifar10.errors import UsageError
from cifar10.layers import logits_layer
from cifar10.models import architecture, custom
from cifar10.models.architecture import APPLICATIONS_PREFIX, Architecture

HEAD = "head"
_CHANNELS = 3
# Statistics of ImageNet's images on the scale 0 to 1, from Keras's imagenet_utils.
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_DEVIATION = (0.229, 0.224, 0.225)


def find_architecture(name: str) -> Architecture:
    """Returns the architecture that `applications:NAME` names."""
    application = name.removeprefix(APPLICATIONS_PREFIX)
    there = [one for one in dir(keras.applications) if one[0].isupper()]
    if application not in there:
        raise UsageError(f"--model {name}: Keras's networks are {', '.join(there)}.")
    return Architecture(functools.partial(build, application))


def build(application: str, shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Builds a network of `keras.applications` with a new head of `classes` logits."""
    images = keras.Input(shape, name="images")
    features = _features(application, shape, _rescaled(application, images))
    logits = logits_layer(classes, name=HEAD)(features.output)
    network = keras.Model(images, logits, name=application.lower())
    _set_normalization(application, network)
    return network


def with_imagenet_weights(name: str, image_shape: tuple[int, int, int]) -> keras.Model:
    """Returns a network with ImageNet weights, up to its global average pooling.

    The weights are downloaded if they are not in Keras's cache.
    """
    application = name.removeprefix(APPLICATIONS_PREFIX)
    problem = (
        "its ImageNet weights cannot be loaded from ~/.keras/models or the network.\n"
        "Without a network, put the file at the end of the URL below into that folder"
    )
    with custom.explained(f"--model {name}", problem):
        return _features(application, image_shape, None, weights="imagenet")


def _set_normalization(application: str, network: keras.Model) -> None:
    """Makes EfficientNet normalize images as in its publication.

    The `Normalization` layer uses its mean and variance only after `finalize_state`,
    which restoring a checkpoint does not call. So ImageNet's mean and variance are set
    here. Keras's ImageNet weights hold deviations instead of variances, and a second
    layer makes up for it (https://github.com/tensorflow/tensorflow/issues/49930).
    Networks built without these weights lack that layer, and so need true variances.
    """
    if _module(application).__name__.endswith(".efficientnet"):
        kind = keras.layers.Normalization
        (layer,) = (one for one in network.layers if isinstance(one, kind))
        mean, variance = layer.weights[:2]
        mean.assign(_IMAGENET_MEAN)
        variance.assign(np.square(_IMAGENET_DEVIATION))
        layer.finalize_state()


def _features(
    application: str,
    image_shape: tuple[int, int, int],
    images: keras.KerasTensor | None,
    weights: str | None = None,
) -> keras.Model:
    """Builds the network up to its global average pooling."""
    builder = getattr(keras.applications, application)
    if image_shape[-1] != _CHANNELS:
        name = f"{APPLICATIONS_PREFIX}{application}"
        why = f"takes images with {_CHANNELS} channels, not {image_shape[-1]}"
        raise UsageError(f"--model {name} {why}. Give another model.")
    with warnings.catch_warnings():
        # Keras warns that it loads the weights for 224 x 224, which is intended.
        warnings.filterwarnings("ignore", "`input_shape` is undefined")
        how = {"include_top": False, "weights": weights, "pooling": "avg"}
        return builder(input_tensor=images, input_shape=image_shape, **how)


def _rescaled(application: str, images: keras.KerasTensor) -> keras.KerasTensor:
    """Converts standardized images to pixels, then applies `preprocess_input`."""
    means, deviations = architecture.channel_statistics(_CHANNELS)
    pixels = keras.layers.Rescaling(
        [255.0 * deviation for deviation in deviations],
        [255.0 * mean for mean in means],
        # Full precision, because the 8 bits of bfloat16 leave 255.0 no fraction.
        dtype=keras.config.dtype_policy().variable_dtype,
        name="pixels",
    )(images)
    return _module(application).preprocess_input(pixels)


def _module(application: str) -> Any:
    """Returns the module that defines the application and its preprocessing."""
    builder = getattr(keras.applications, application)
    return sys.modules[inspect.unwrap(builder).__module__]
