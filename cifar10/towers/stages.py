"""Stages of a recipe and `--freeze`: what is trained at which steps, and what never.

    [[stages]]
    until = 0.375                 # Fraction of all steps; the last stage has none.
    image_size = 24               # Side to which distorted images are reduced.

    [[stages]]
    frozen = ["conv1/bias"]       # Not trained: variables by path, or layers.

A name that ends in `*` stands for all names that begin so; `all-but-head` is every
layer but the last one that has variables. All stages freeze what `--freeze` names.

Which stage a step is in follows from its number alone, so a resumed run is in the same
one. All steps of a stage share one trace.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cifar10.errors import UsageError, first_few
from cifar10.models import layer_tree

if TYPE_CHECKING:
    import keras

_ALL_BUT_HEAD = "all-but-head"
_SHOWN_NAMES = 12


class Stage(NamedTuple):
    """Consecutive steps with images of one size and the same frozen variables."""

    end: int  # The last step.
    image_size: int | None = None  # None: images are not reduced.
    frozen: tuple[str, ...] = ()


def resolve_stages(
    declared: Sequence | None, max_steps: int, freeze: str | None = None
) -> list[Stage]:
    """Returns the stages of a training, a single one if none are declared.

    Args:
        declared: The tables of a recipe, as above.
        max_steps: Steps of the whole training.
        freeze: Further names that are frozen in every stage, separated by commas.

    Raises:
        UsageError: A table is invalid. Only the model knows whether sizes and names
            fit; `prepare_model` checks them.
    """
    stages, begin = [], 0.0
    always = tuple(name.strip() for name in (freeze or "").split(",") if name)
    tables = declared or [{}]
    for number, table in enumerate(tables, 1):
        _check_table(number, table)
        is_last = number == len(tables)
        until = table.get("until", 1.0 if is_last else begin)
        if not begin < until <= 1.0 or (is_last and until < 1.0):
            raise UsageError(
                f"stage {number} of the recipe: until = {until}: a stage ends at this "
                f"fraction of the steps, above {begin}, where it begins; the last one "
                "needs none, and ends at 1."
            )
        # A step is in the stage in which it begins.
        end = math.ceil(round(until * max_steps, 6))
        frozen = (*always, *table.get("frozen", ()))
        stages.append(Stage(end, table.get("image_size"), frozen))
        begin = until
    return stages


def _check_table(number: int, table: Any) -> None:
    """Refuses entries of a stage with an unknown name or another type."""
    for name, value in table.items() if isinstance(table, dict) else [("", table)]:
        is_bool = isinstance(value, bool)
        fits = {
            "until": isinstance(value, int | float) and not is_bool,
            "image_size": isinstance(value, int) and not is_bool,
            "frozen": isinstance(value, list)
            and all(isinstance(item, str) for item in value),
        }
        if not fits.get(name):
            raise UsageError(
                f"stage {number} of the recipe: {name} = {value!a}: a stage has until, "
                "a number, image_size, an integer, and frozen, a list of names."
            )


def prepare_model(
    model: "keras.Model",
    name: str,
    stages: Sequence[Stage],
    image_shape: tuple[int, int, int],
    classes: int,
) -> None:
    """Lets a model take the images of every stage, and refuses one that cannot.

    Args:
        model: Built for `image_shape`.
        name: What `--model` calls it.
        stages: As `resolve_stages` returns them.
        image_shape: Height, width and channels of images that are not reduced.
        classes: Number of classes.

    Raises:
        UsageError: The model does not take images of a stage's size, a frozen name is
            unknown, or nothing is left to train.
    """
    import keras

    from cifar10.models import custom

    *side, channels = image_shape
    for number, stage in enumerate(stages, 1):
        what = f"stage {number} of the recipe"
        _check_frozen(model, name, stage.frozen)
        if (size := stage.image_size) is not None:
            if not 0 < size <= min(side):
                raise UsageError(f"{what}: images have sizes from 1 to {min(side)}.")
            # Keras would refuse another size, whatever the layers can take.
            model.input_spec = keras.layers.InputSpec(ndim=len(image_shape) + 1)
            custom.check_training(name, model, (size, size, channels), classes)


def _check_frozen(model: "keras.Model", name: str, frozen: Sequence[str]) -> None:
    """Refuses names that match no variable or layer, and names that freeze all."""
    paths = [variable.path for variable in model.trainable_variables]
    for one in frozen:
        if one != _ALL_BUT_HEAD and not any(_is_named(path, [one]) for path in paths):
            layers = [*dict.fromkeys(path.rpartition("/")[0] for path in paths)]
            raise UsageError(
                f"--freeze, or a stage of the recipe: model {name} has no layer or "
                f"variable named {one!a}.\nIts layers are "
                f"{first_few(layers, _SHOWN_NAMES)}."
            )
    if all(find_frozen(model, model.trainable_variables, frozen)):
        raise UsageError(
            f"--freeze, or a stage of the recipe: {', '.join(frozen)} would "
            f"freeze all variables of {name}. Freeze fewer."
        )


def find_frozen(
    model: "keras.Model", variables: Sequence["keras.Variable"], names: Sequence[str]
) -> list[bool]:
    """Returns which variables of a model are frozen by names as in `Stage.frozen`."""
    of_head: set[int] = set()
    if _ALL_BUT_HEAD in names:
        of_head = {id(variable) for variable in layer_tree.head(model).variables}
    return [
        _is_named(variable.path, names)
        or (_ALL_BUT_HEAD in names and id(variable) not in of_head)
        for variable in variables
    ]


def _is_named(path: str, names: Sequence[str]) -> bool:
    """Returns whether a variable, or a layer that has it, is among the names."""
    return any(
        f"{path}/".startswith(f"{name}/")
        or (name.endswith("*") and path.startswith(name[:-1]))
        for name in names
    )


@contextlib.contextmanager
def frozen_as_in_evaluation(
    model: "keras.Model", names: Sequence[str]
) -> Iterator[None]:
    """Makes batch normalization that is completely frozen compute as in evaluation.

    Keras does the same with `trainable = False`
    (https://keras.io/api/layers/normalization_layers/batch_normalization): the layer
    uses its moving statistics and does not change them. Setting that attribute would
    hide the variables from the optimizer and the checkpoints.
    """
    import keras

    found = [
        layer
        for layer in (layer_tree.layers(model) if names else ())
        if isinstance(layer, keras.layers.BatchNormalization)
        and all(find_frozen(model, layer.variables, names))
    ]
    for layer in found:
        in_inference = functools.partial(_call_in_inference, layer.call)
        layer.call = getattr(layer, "call_frozen", in_inference)
    try:
        yield
    finally:
        for layer in found:
            del layer.call


def _call_in_inference(call: Any, inputs: Any, **options: Any) -> Any:
    return call(inputs, **{**options, "training": False})
