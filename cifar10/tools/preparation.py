"""Prepares images for an exported model, and describes how they are prepared."""

import math
from typing import Any

import numpy as np
from keras import ops

from cifar10.config.fields import WHOLE
from cifar10.input.distortions import image_shape
from cifar10.models.architecture import channel_statistics


def describe(distortion: str, picture_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Describes `distortions.prepare` as JSON values, for programs in any language.

    Images are resized, cropped, and standardized: (value - mean) / deviation. If the
    description has no `mean` and `deviation` of each channel, they are those of all
    values of an image, and the deviation is at least `least_deviation`.
    """
    height, width, channels = image_shape(distortion, picture_shape)
    top, left = (picture_shape[0] - height) // 2, (picture_shape[1] - width) // 2
    described: dict[str, Any] = {
        "resize": "the largest centre of these proportions, bicubic, antialiased",
        "size": [*picture_shape[:2]],
        "crop": {"top": top, "left": left, "height": height, "width": width},
    }
    if distortion in WHOLE:
        statistics = channel_statistics(channels)
        of_channels = zip(("mean", "deviation"), statistics, strict=True)
        described |= {name: [255.0 * one for one in of] for name, of in of_channels}
    else:
        described["least_deviation"] = 1.0 / math.sqrt(height * width * channels)
    return described


def prepare(images: Any, picture_shape: tuple[int, int, int], distortion: str) -> Any:
    """Prepares uint8 images of `picture_shape` for the model, as `describe` documents.

    Only Keras's operations are used, so that `images` may be the symbolic input of a
    model that loads without this package. LiteRT has no float64, so float32 is used.
    """
    how = describe(distortion, picture_shape)
    values, crop = ops.cast(images, "float32"), how["crop"]
    if distortion in WHOLE:
        mean, deviation = (np.array(how[of], "float32") for of in ("mean", "deviation"))
        return (values - mean) / deviation
    rows = slice(crop["top"], crop["top"] + crop["height"])
    values = values[:, rows, slice(crop["left"], crop["left"] + crop["width"])]
    centred = values - ops.mean(values, axis=(1, 2, 3), keepdims=True)
    deviation = ops.sqrt(ops.mean(centred * centred, axis=(1, 2, 3), keepdims=True))
    return centred / ops.maximum(deviation, how["least_deviation"])
