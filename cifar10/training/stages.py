"""Prepares a model for the stages of a recipe."""

import keras

from cifar10.config.config import ResolvedConfig
from cifar10.config.stages import is_frozen, resolve
from cifar10.errors import UsageError
from cifar10.models import custom


def prepare(
    config: ResolvedConfig,
    model: keras.Model,
    image_shape: tuple[int, int, int],
    classes: int,
) -> None:
    """Lets a model take the images of every stage, and refuses one that cannot.

    `image_shape` is that of images that are not reduced, with which it was built.
    """
    paths = [variable.path for variable in model.trainable_variables]
    *side, channels = image_shape
    for number, stage in enumerate(resolve(config.stages, config.max_steps), 1):
        what = f"stage {number} of recipe {config.recipe}"
        for name in stage.frozen:
            if not any(is_frozen(path, [name]) for path in paths):
                raise UsageError(
                    f"{what}: {config.model} has no variable {name!a} to freeze,\nand "
                    "no such layer. Take it out of a copy of the recipe."
                )
        if all(is_frozen(path, stage.frozen) for path in paths):
            raise UsageError(f"{what}: it trains no variable; freeze fewer.")
        if (size := stage.image_size) is not None:
            if not 0 < size <= min(side):
                raise UsageError(f"{what}: images have sizes from 1 to {min(side)}.")
            # Keras would refuse another size, whatever the layers can take.
            model.input_spec = keras.layers.InputSpec(ndim=len(image_shape) + 1)
            custom.check_training(config.model, model, (size, size, channels), classes)
