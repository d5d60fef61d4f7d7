"""The scale of a model's images: pixels minus a mean, divided by a deviation."""

import math
from collections.abc import Sequence

# Mean and deviation of each channel over CIFAR-10's training set, on the scale 0 to 1
# (airbench94).
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)


def channel_statistics(channels: int) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and deviation of each channel, on the scale 0 to 1.

    They are CIFAR-10's. Images that are not in colour get the mean over its channels.
    """
    if channels == len(CHANNEL_MEAN):
        return CHANNEL_MEAN, CHANNEL_DEVIATION
    return (
        [math.fsum(CHANNEL_MEAN) / len(CHANNEL_MEAN)] * channels,
        [math.fsum(CHANNEL_DEVIATION) / len(CHANNEL_DEVIATION)] * channels,
    )
