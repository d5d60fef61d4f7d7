"""Prepares a model for the stages of a recipe."""

import keras

from cifar10.config.config import ResolvedConfig
from cifar10.config.stages import is_frozen
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
    for number, stage in enumerate(config.resolved_stages, 1):
        what = f"stage {number} of recipe {config.recipe}"
        for name in stage.frozen:
            if not any(is_frozen(path, [name]) for path in paths):
                raise UsageError(
                    f"{what}: {config.model} has no variable or layer {name!a}\nto "
                    f"freeze; its {len(paths)} variables begin with {paths[0]}.\n"
                    "Correct it, or take the stages out of a copy of the recipe."
                )
        if all(is_frozen(path, stage.frozen) for path in paths):
            raise UsageError(f"{what}: it trains no variable; freeze fewer.")
        if size := stage.image_size:
            if size > min(side):
                raise UsageError(
                    f"{what}: image_size = {size}: images have {min(side)} pixels a "
                    "side, and are only reduced."
                )
            # Keras would refuse another size, whatever the layers can take.
            model.input_spec = keras.layers.InputSpec(ndim=len(image_shape) + 1)
            custom.check_training(config.model, model, (size, size, channels), classes)
