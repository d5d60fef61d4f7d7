"""The networks of `keras.applications`, for images as this package scales them.

Each was trained on images of its own scale, that of Keras's `preprocess_input`. A layer
in front of it converts our images to that scale, so that a network computes from them
what Keras's computes from the pixels, and published weights fit.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from cifar10.errors import UsageError, reason
from cifar10.models import names
from cifar10.models.scale import channel_statistics

HEAD = "head"
_CHANNELS = 3
# Of ImageNet's images on the scale 0 to 1, as in Keras's imagenet_utils.
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_DEVIATION = (0.229, 0.224, 0.225)


def find(name: str) -> Callable[..., keras.Model]:
    """Returns the function that builds `applications:NAME`."""

    def build(image_shape: tuple[int, int, int], classes: int) -> keras.Model:
        """Builds the network with a head of `classes` logits in place of its own."""
        images = keras.Input(image_shape, name="images")
        features = _features(name, image_shape, _rescaled(name, images))
        logits = layers.Dense(
            classes,
            # Logits keep full precision in mixed-precision training.
            dtype=keras.config.dtype_policy().variable_dtype,
            name=HEAD,
        )(features.output)
        network = keras.Model(images, logits, name=names.of_application(name).lower())
        _set_normalization(name, network)
        return network

    names.check(name)
    return build


def with_imagenet_weights(name: str, image_shape: tuple[int, int, int]) -> keras.Model:
    """Returns Keras's own network up to the mean over the image, with ImageNet weights.

    The weights are fetched if they are not in Keras's cache.

    Raises:
        UsageError: They are not there and cannot be fetched.
    """
    try:
        return _features(name, image_shape, None, weights="imagenet")
    except UsageError:
        raise
    except Exception as error:
        what = (
            f"--initial_weights imagenet: the weights of {names.of_application(name)}"
        )
        if isinstance(error, ValueError | OSError):
            raise UsageError(f"{what} cannot be loaded.\n{reason(error)}") from error
        if "URL fetch failure" not in str(error):
            raise
        url = re.search(r"https?://\S+?(?=:? )", f"{error} ")
        raise UsageError(
            f"{what} are not in Keras's cache,\nand cannot be fetched. Put them there "
            f"from a machine with a network:\n    {url[0] if url else error}\n"
            "into ~/.keras/models; or name a .keras file, or the directory of a run."
        ) from error


def _set_normalization(name: str, network: keras.Model) -> None:
    """Makes EfficientNet normalize its images as it did when it was published.

    Keras's normalization knows mean and variance only after `finalize_state`, which no
    checkpoint calls; so they are set before. The published weights have them, but with
    a deviation as the variance, and with a further layer, absent from the network
    without weights, that divides by the root once more: by the deviation in all
    (https://github.com/tensorflow/tensorflow/issues/49930).
    """
    if _module(name).__name__.endswith(".efficientnet"):
        (layer,) = (
            one for one in network.layers if isinstance(one, layers.Normalization)
        )
        mean, variance = layer.weights[:2]
        mean.assign(_IMAGENET_MEAN)
        variance.assign(np.square(_IMAGENET_DEVIATION))
        layer.finalize_state()


def _features(
    name: str,
    image_shape: tuple[int, int, int],
    images: keras.KerasTensor | None,
    weights: str | None = None,
) -> keras.Model:
    """Builds the network up to the mean over the image."""
    builder = getattr(keras.applications, names.of_application(name))
    if image_shape[-1] != _CHANNELS:
        raise UsageError(
            f"--model {name}: it takes images of {_CHANNELS} channels, and these have "
            f"{image_shape[-1]}.\nGive another model."
        )
    try:
        with warnings.catch_warnings():
            # The warning that the weights of 224 x 224 are taken, as they should be.
            warnings.filterwarnings("ignore", "`input_shape` is undefined")
            return builder(
                include_top=False,
                weights=weights,
                input_tensor=images,
                input_shape=image_shape,
                pooling="avg",
            )
    except ValueError as error:
        least = re.search(r"must be at least (\d+)", str(error))
        if not least:
            raise
        height, width, _ = image_shape
        raise UsageError(
            f"--model {name}: it takes images of at least {least[1]} x {least[1]}, and "
            f"these are {height} x {width}.\nGive larger ones (--image_size, for "
            "pictures of yours), another model, or --distortions\nthat do not crop, "
            "such as flip_translate."
        ) from error


def _rescaled(name: str, images: keras.KerasTensor) -> keras.KerasTensor:
    """Brings images from this package's scale to that of the network.

    Both scales, and so the conversion between them, are linear in each channel; some
    networks take blue first.
    """
    means, deviations = (255.0 * np.array(s) for s in channel_statistics(_CHANNELS))
    black = np.zeros((1, 1, 1, _CHANNELS))
    primaries = np.diag([255.0] * _CHANNELS)[:, None, None]
    preprocess = _module(name).preprocess_input
    offset = preprocess(black.copy())[0, 0, 0]
    # changes[i, j]: what 255 of the pixel's channel i adds to the network's channel j.
    changes = preprocess(primaries.copy())[:, 0, 0] - offset
    if not np.allclose(changes, np.diag(np.diag(changes))):
        images = keras.ops.flip(images, axis=-1)
        changes, means, deviations = changes[::-1], means[::-1], deviations[::-1]
    factors = np.diag(changes) / 255.0
    return layers.Rescaling(
        (factors * deviations).tolist(),
        (factors * means + offset).tolist(),
        # In bfloat16, 255 values have room for 8 bits and no fraction.
        dtype=keras.config.dtype_policy().variable_dtype,
        name="scale_of_network",
    )(images)


def _module(name: str) -> Any:
    """Returns the module of the network, which has its constants."""
    builder = getattr(keras.applications, names.of_application(name))
    return sys.modules[inspect.unwrap(builder).__module__]
