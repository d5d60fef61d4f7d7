"""What the package knows of an architecture, and the scale of all models' images."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError

# Mean and deviation of each channel over CIFAR-10's training set, on the scale 0 to 1
# (airbench94).
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)

APPLICATIONS_PREFIX = "applications:"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture: how it is built, and how it is best trained.

    Each has a file of its own and an entry in `registry.py`; no other file knows its
    name.

    Attributes:
        name: What `--model` calls it.
        build: Takes image_shape, (height, width, channels), classes and the
            `options`, and returns a Keras model; refuses images that are too small.
        module: The file in this folder that has `build` and perhaps `initialize`, which
            `find_architecture` imports, and TensorFlow with them; None if the functions
            are given here.
        recipe: The recipe of a training that names none; None for that of its data.
        options: What --depth and --width mean for it; without an entry it has no such
            argument.
        trained_parts: Paths of variables that muon trains only at the start, each with
            the fraction of the training, for a learning rate that falls evenly; `Muon`
            says what happens with other schedules.
        initialize: Sets the variables that are computed from training images. It takes
            the model; images, uint8 [count, height, width, channels], an array or
            something that becomes one when indexed; and the function from such images
            to those that the model takes, without distortions.
        imagenet_features: Takes image_shape, and returns Keras's own network up to the
            mean over the image, with ImageNet weights; None if there are none.
    """

    name: str
    build: Callable[..., Any] = lambda *_: None
    module: str | None = None
    recipe: str | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trained_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    initialize: Callable[..., None] = lambda *_: None
    imagenet_features: Callable[..., Any] | None = None


def channel_statistics(channels: int) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and deviation of each channel, on the scale 0 to 1.

    Models take pixels minus this mean, divided by this deviation. Both are CIFAR-10's;
    images that are not in colour get the mean over its channels.
    """
    if channels == len(CHANNEL_MEAN):
        return CHANNEL_MEAN, CHANNEL_DEVIATION
    return (
        [math.fsum(CHANNEL_MEAN) / len(CHANNEL_MEAN)] * channels,
        [math.fsum(CHANNEL_DEVIATION) / len(CHANNEL_DEVIATION)] * channels,
    )


def model_error(name: str, problem: str) -> UsageError:
    """Returns the error to raise for a model with this problem."""
    return UsageError(f"--model {name}: {problem}")


def no_module_error(name: str) -> UsageError:
    """Returns the error to raise for a model whose module does not exist."""
    module = name.partition(":")[0]
    return model_error(
        name,
        f"there is no module {module} in {Path.cwd()} or installed.\n"
        "Run this in the folder that has it, or add that folder to PYTHONPATH.",
    )
