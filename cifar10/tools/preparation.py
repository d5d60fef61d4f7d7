"""Prepares images for an exported model, and describes how they are prepared."""

import math
from typing import Any

import numpy as np
from keras import ops

from cifar10.input import pipeline
from cifar10.input.distortions import channel_statistics


def describe(distortion: str, picture_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Describes `pipeline.prepare` as JSON values, for programs in any language."""
    *size, channels = picture_shape
    top, left, height, width = _crop(distortion, picture_shape)
    standardization: dict[str, Any] = {
        "formula": "(value - mean) / max(deviation, least_deviation)",
        "mean": "of all values of one image, after the crop",
        "deviation": "of all values of one image, after the crop",
        "least_deviation": 1.0 / math.sqrt(height * width * channels),
    }
    if distortion in pipeline.WHOLE:
        means, deviations = channel_statistics(channels)
        standardization = {
            "formula": "(value - mean[channel]) / deviation[channel]",
            "mean": [255.0 * mean for mean in means],
            "deviation": [255.0 * part for part in deviations],
        }
    return {
        "pixels": "uint8 [height, width, channel], 0 to 255",
        "channels": ["red", "green", "blue"] if channels == 3 else ["brightness"],
        "size": size,
        "resize": "the largest centre of these proportions, bicubic, antialiased",
        "crop": {"top": top, "left": left, "height": height, "width": width},
        "standardization": standardization,
    }


def prepare(images: Any, picture_shape: tuple[int, int, int], distortion: str) -> Any:
    """Prepares uint8 images of any size for the model, as `describe` documents.

    Only Keras's operations are used, so that `images` may be the symbolic input of a
    model that loads without this package. LiteRT has no float64, so float32 is used.

    Args:
        images: uint8 [batch, height, width, channels], all of one size.
        picture_shape: Height, width and channels of one image of the data set.
        distortion: Value of `--distortions`.

    Returns:
        float32 [batch, *image_shape(distortion, picture_shape)].
    """
    values = fit(images, picture_shape)
    if distortion in pipeline.WHOLE:
        statistics = channel_statistics(picture_shape[-1])
        means, deviations = (np.array(each, np.float32) * 255.0 for each in statistics)
        return (values - means) / deviations
    top, left, height, width = _crop(distortion, picture_shape)
    values = values[:, top : top + height, left : left + width]
    centred = values - ops.mean(values, axis=(1, 2, 3), keepdims=True)
    deviation = ops.sqrt(ops.mean(centred * centred, axis=(1, 2, 3), keepdims=True))
    count = height * width * picture_shape[-1]
    return centred / ops.maximum(deviation, 1.0 / math.sqrt(count))


def _crop(
    distortion: str, picture_shape: tuple[int, int, int]
) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of the crop that the model takes."""
    height, width, _ = pipeline.image_shape(distortion, picture_shape)
    top, left = (picture_shape[0] - height) // 2, (picture_shape[1] - width) // 2
    return top, left, height, width


def fit(images: Any, shape: tuple[int, int, int]) -> Any:
    """Resizes uint8 images of any size to the data set's `shape`, as `predict` does.

    Replaces Keras's `Resizing` layer, whose antialiasing LiteRT cannot compute. A few
    values differ by 1 from Pillow's, as Pillow rounds weights. Larger differences occur
    only at sharp edges of tall images, whose height newer Pillow versions resize first.
    """
    values = ops.cast(images, "float32")
    rows, columns = _numbers(values, axis=1), _numbers(values, axis=2)
    scale = ops.minimum(
        (ops.max(rows) + 1.0) / shape[0], (ops.max(columns) + 1.0) / shape[1]
    )
    for count, pixels, sums in (
        (shape[1], columns, "xw,bhwc->bhxc"),
        (shape[0], rows, "yh,bhxc->byxc"),
    ):
        values = ops.einsum(sums, _weights(count, pixels, scale), values)
        values = ops.clip(ops.floor(values + 0.5), 0.0, 255.0)
    return values


def _numbers(values: Any, axis: int) -> Any:
    """Returns the indices 0, 1, ... along an axis.

    Works for symbolic tensors, whose length is unknown.
    """
    others = tuple(other for other in range(4) if other != axis)
    return ops.cumsum(ops.ones_like(ops.max(values, axis=others))) - 1.0


def _weights(count: int, pixels: Any, scale: Any) -> Any:
    """Returns the weights with which input pixels are summed to each output pixel.

    Each row is for one output pixel, which is as wide as `scale` input pixels.
    """
    places = (np.arange(count, dtype=np.float32) + (1 - count) / 2)[:, None]
    distances = pixels - ops.max(pixels) / 2 - scale * places
    # Keys's cubic kernel with a = -0.5, widened where several pixels become one.
    x = ops.abs(distances) / ops.maximum(scale, 1.0)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((2.5 - 0.5 * x) * x - 4.0) * x + 2.0
    weights = ops.where(x < 1.0, near, ops.where(x < 2.0, far, ops.zeros_like(x)))
    return weights / ops.sum(weights, axis=1, keepdims=True)
