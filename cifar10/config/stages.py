"""The stages of a training, tables of a recipe.

    [[stages]]
    until = 0.375                 # Of the training's steps; the last stage has none.
    image_size = 24               # Side to which distorted images are reduced.

    [[stages]]
    frozen = ["whitening/bias"]   # Not trained: variables by path, or layers.

A name that ends in `*` stands for all names that begin so; `all-but-head` is every
layer but the last one that has variables.

Which stage a step is in follows from its number alone, so a resumed run is in the same
one. All steps of a stage share one trace.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from cifar10.config.options import is_a
from cifar10.errors import UsageError

ALL_BUT_HEAD = "all-but-head"
_TYPES = {"until": float, "image_size": int, "frozen": list[str]}


class Stage(NamedTuple):
    """Steps of one kind, one after another."""

    end: int  # The last step.
    image_size: int | None = None  # None: images are not reduced.
    frozen: tuple[str, ...] = ()


def resolve(declared: Sequence | None, max_steps: int) -> list[Stage]:
    """Returns the stages of a training, a single one if none are declared.

    Refuses invalid tables; whether sizes and variables fit is up to the model.
    """
    stages, begin = [], 0.0
    tables = declared or [{}]
    for number, table in enumerate(tables, 1):
        what = f"stage {number} of the recipe"
        entries = table.items() if isinstance(table, dict) else [("", table)]
        for name, value in entries:
            if name not in _TYPES or not is_a(value, _TYPES[name]):
                raise UsageError(
                    f"{what}: {name} = {value!a}: it has until, a number, image_size, "
                    "a whole number, and frozen, a list of names."
                )
        is_last = number == len(tables)
        until = table.get("until", 1.0 if is_last else begin)
        if not begin < until <= 1.0 or (is_last and until < 1.0):
            raise UsageError(
                f"{what}: until = {until}: it ends at that part of the steps, above "
                f"{begin} where it begins; the last one needs none, and ends at 1."
            )
        # A step is in the stage in which it begins.
        end = math.ceil(round(until * max_steps, 6))
        frozen = tuple(table.get("frozen", ()))
        stages.append(Stage(end, table.get("image_size"), frozen))
        begin = until
    return stages


def is_frozen(path: str, names: Sequence[str]) -> bool:
    """Returns whether a variable, or a layer that has it, is among the names."""
    return any(
        f"{path}/".startswith(f"{name}/")
        or (name.endswith("*") and path.startswith(name[:-1]))
        for name in names
    )
