"""The class that describes an architecture, and the channel statistics of CIFAR-10."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Each channel's over CIFAR-10's training set, on the scale 0 to 1, from airbench94.
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)

APPLICATIONS_PREFIX = "applications:"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How a model is built, and how it is best trained.

    Each built-in architecture has a file in this folder and an entry in `registry.py`.

    Attributes:
        build: Function that returns a Keras model. It takes image_shape, as
            (height, width, channels); the number of classes; and perhaps depth and
            width. It raises an error if images are too small.
        module: Module in this folder that defines `build` and perhaps `initialize`, for
            `find_architecture` to import. None if `build` is given directly.
        recipe: Default recipe; None for the default recipe of the data.
        trained_parts: Maps paths of variables to fractions: muon trains each variable
            only up to this fraction of the training run. This holds for a learning rate
            that falls linearly; `Muon` documents other schedules.
        initialize: Function that sets variables based on training images. It takes the
            model; the images, uint8 [count, height, width, channels], as an array or an
            object that returns an array when indexed; and a function that prepares such
            images for the model without distorting them.
    """

    build: Callable[..., Any] = lambda *_: None
    module: str | None = None
    recipe: str | None = None
    trained_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    initialize: Callable[..., None] = lambda *_: None


def channel_statistics(channels: int) -> tuple[Sequence[float], Sequence[float]]:
    """Returns a mean and a deviation for each channel, for pixel values from 0 to 1.

    For three channels, these are CIFAR-10's. For any other number, every channel gets
    the average of CIFAR-10's three means, and the average of its three deviations.
    """
    if channels == len(CHANNEL_MEAN):
        return CHANNEL_MEAN, CHANNEL_DEVIATION
    mean, deviation = map(statistics.fmean, (CHANNEL_MEAN, CHANNEL_DEVIATION))
    return [mean] * channels, [deviation] * channels
