"""Prepares a model for the stages of a recipe, and for --freeze."""

import keras

from cifar10.config.config import ResolvedConfig
from cifar10.config.stages import ALL_BUT_HEAD, Stage, is_frozen
from cifar10.errors import UsageError, first_few
from cifar10.models import custom
from cifar10.towers import freezing

_SHOWN_NAMES = 12


def prepare(
    config: ResolvedConfig,
    model: keras.Model,
    image_shape: tuple[int, int, int],
    classes: int,
) -> None:
    """Lets a model take the images of every stage, and refuses one that cannot.

    `image_shape` is that of images that are not reduced, with which it was built.
    """
    *side, channels = image_shape
    for number, stage in enumerate(config.all_stages, 1):
        what = (
            f"stage {number} of recipe {config.run.recipe}"
            if config.update.stages
            else ""
        )
        _check_frozen(config, model, stage, what)
        if (size := stage.image_size) is not None:
            if not 0 < size <= min(side):
                raise UsageError(f"{what}: images have sizes from 1 to {min(side)}.")
            # Keras would refuse another size, whatever the layers can take.
            model.input_spec = keras.layers.InputSpec(ndim=len(image_shape) + 1)
            custom.check_training(
                config.network.model, model, (size, size, channels), classes
            )


def _check_frozen(
    config: ResolvedConfig, model: keras.Model, stage: Stage, what: str
) -> None:
    """Refuses names of no variable or layer, and names that freeze everything."""
    variables = model.trainable_variables
    for name in stage.frozen:
        if name == ALL_BUT_HEAD or any(is_frozen(v.path, [name]) for v in variables):
            continue
        if name in config.fine_tuning.frozen:
            raise UsageError(
                f"--freeze {config.fine_tuning.freeze}: {config.network.model} has no "
                f"variable {name!a} to freeze, and no such layer.\nIt has "
                f"{_layers_to_train(model)}."
            )
        raise UsageError(
            f"{what}: {config.network.model} has no variable {name!a} to freeze,\nand "
            "no such layer. Remove it from a copy of the recipe."
        )
    if all(freezing.frozen(model, variables, stage.frozen)):
        by = (
            f"--freeze {config.fine_tuning.freeze}" if config.fine_tuning.freeze else ""
        )
        says = ", with ".join(filter(None, (what, by)))
        raise UsageError(f"{says}: no variable is left to train; freeze fewer.")


def _layers_to_train(model: keras.Model) -> str:
    paths = (variable.path for variable in model.trainable_variables)
    names = [*dict.fromkeys(path.rpartition("/")[0] for path in paths)]
    return first_few(names, _SHOWN_NAMES)
