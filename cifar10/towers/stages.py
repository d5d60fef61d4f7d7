"""Stages of a recipe, and `--freeze`: which variables train at which steps.

    [[stages]]
    until = 0.375                 # Fraction of all steps; omitted in the last stage.
    image_size = 24               # Height and width to which images are reduced.

    [[stages]]
    frozen = ["conv1/bias"]       # Variables (by path) or layers not to train.

A name that ends in `*` stands for all names with that beginning. `all-but-head` stands
for all layers but the last with variables. `--freeze` freezes names in every stage.

The step number alone determines the stage. All steps of a stage share one trace.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cifar10.errors import UsageError, first_few
from cifar10.models import layer_tree

if TYPE_CHECKING:
    import keras

_ALL_BUT_HEAD = "all-but-head"


class Stage(NamedTuple):
    """Consecutive steps with images of one size and the same frozen variables."""

    end: int  # The last step.
    image_size: int | None = None  # None if images are not reduced.
    frozen: tuple[str, ...] = ()


def resolve_stages(
    declared: Sequence | None, max_steps: int, freeze: str | None = None
) -> list[Stage]:
    """Returns the stages of a training run; a single stage if none are declared.

    `freeze` holds names to freeze in every stage, separated by commas.
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
                f"stage {number} of the recipe: until = {until}: give more than "
                f"{begin}, its beginning, and at most 1. The last stage needs none."
            )
        # A step belongs to the stage in which the step begins.
        end = math.ceil(round(until * max_steps, 6))
        frozen = (*always, *table.get("frozen", ()))
        stages.append(Stage(end, table.get("image_size"), frozen))
        begin = until
    return stages


def _check_table(number: int, table: Any) -> None:
    """Refuses entries with an unknown name or a value of the wrong type."""
    for name, value in table.items() if isinstance(table, dict) else [("", table)]:
        kinds = {"until": int | float, "image_size": int, "frozen": list}
        is_kind = isinstance(value, kinds.get(name, ())) and not isinstance(value, bool)
        items = value if isinstance(value, list) else []
        if not is_kind or not all(isinstance(item, str) for item in items):
            raise UsageError(
                f"stage {number} of the recipe: {name} = {value!a}: give until = "
                "NUMBER, image_size = INTEGER or frozen = [NAMES]."
            )


def prepare_model(
    model: "keras.Model",
    name: str,
    stages: Sequence[Stage],
    image_shape: tuple[int, int, int],
    classes: int,
) -> None:
    """Prepares a model, built for `image_shape`, for the image sizes of all stages."""
    import keras

    from cifar10.models import custom

    *side, channels = image_shape
    for number, stage in enumerate(stages, 1):
        what = f"stage {number} of the recipe"
        _check_frozen(model, name, stage.frozen)
        if (size := stage.image_size) is not None:
            if not 0 < size <= min(side):
                raise UsageError(f"{what}: image_size = {size}: give 1 to {min(side)}.")
            # Without this, Keras refuses other sizes even if all layers accept them.
            model.input_spec = keras.layers.InputSpec(ndim=len(image_shape) + 1)
            where = f"{name} in {what}, with image_size = {size}"
            custom.check_training(where, model, (size, size, channels), classes)


def _check_frozen(model: "keras.Model", name: str, frozen: Sequence[str]) -> None:
    """Refuses names that match no layer or variable, or that freeze all variables."""
    known = layer_tree.paths(model)
    paths = [known[id(variable)] for variable in model.trainable_variables]
    for one in frozen:
        if one != _ALL_BUT_HEAD and not any(_is_named(path, [one]) for path in paths):
            layers = dict.fromkeys(path.rpartition("/")[0] or path for path in paths)
            raise UsageError(
                f"--freeze, or a stage of the recipe: {name} has no layer or variable "
                f"{one!a}. Its layers are {first_few([*layers], 12)}."
            )
    if all(find_frozen(model, model.trainable_variables, frozen)):
        why = f"--freeze or a stage has all of {name}: {', '.join(frozen)}"
        raise UsageError(f"{why}. Freeze fewer.")


def find_frozen(
    model: "keras.Model", variables: Sequence["keras.Variable"], names: Sequence[str]
) -> list[bool]:
    """Returns for each variable whether `names`, from `Stage.frozen`, freeze it."""
    paths, of_head = layer_tree.paths(model), set(map(id, variables))
    if _ALL_BUT_HEAD in names:
        of_head = {id(variable) for variable in layer_tree.head(model)}
    return [
        _is_named(paths.get(id(variable), ""), names) or id(variable) not in of_head
        for variable in variables
    ]


def _is_named(path: str, names: Sequence[str]) -> bool:
    """Returns whether `names` select the variable at `path`, or a layer around it."""
    return any(
        f"{path}/".startswith(f"{name}/")
        or (name.endswith("*") and path.startswith(name[:-1]))
        for name in names
    )


def frozen_as_in_evaluation(
    model: "keras.Model", names: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Makes completely frozen batch normalization layers compute as in evaluation."""
    # They use moving statistics and do not change them, as Keras's layers do if not
    # `trainable` (https://keras.io/api/layers/normalization_layers/batch_normalization),
    # which would hide their variables from the optimizer and the checkpoints.
    import keras

    found = {}
    for layer in layer_tree.layers(model) if names else ():
        is_norm = isinstance(layer, keras.layers.BatchNormalization)
        if is_norm and all(find_frozen(model, layer.variables, names)):
            in_inference = functools.partial(_call_in_inference, layer.call)
            found[layer] = getattr(layer, "call_frozen", in_inference)
    return layer_tree.replaced_calls(found)


def _call_in_inference(call: Any, inputs: Any, **options: Any) -> Any:
    return call(inputs, **{**options, "training": False})
