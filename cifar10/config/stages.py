"""The stages of a training, as a recipe declares them.

Each is a table of its TOML, and lasts `until` a part of the training's steps, the last
one to the end:

    [[stages]]
    until = 0.375
    image_size = 24            # Distorted images are reduced to this side.

    [[stages]]
    frozen = ["whitening/bias"]   # Variables, or layers, that are not trained.

Which stage a step is in follows from its number alone, so a resumed run is in the same
one. All steps of a stage are one trace.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cifar10.errors import UsageError

_ENTRIES = ("until", "image_size", "frozen")


class Stage(NamedTuple):
    """Steps of one kind, one after another."""

    end: int  # The last step.
    image_size: int | None = None  # Of the reduced images; None: they are not reduced.
    frozen: tuple[str, ...] = ()  # Paths of variables, or of layers for all of theirs.


def resolve(declared: Sequence | None, max_steps: int) -> list[Stage]:
    """Returns the stages of a training; without declared ones it is a single one."""
    return [
        Stage(
            # A step is in the stage in which it begins.
            math.ceil(round(entry.get("until", 1.0) * max_steps, 6)),
            entry.get("image_size"),
            tuple(entry.get("frozen", ())),
        )
        for entry in declared or [{}]
    ]


def check(declared: Sequence) -> None:
    """Refuses stages that say nothing, something unknown, or what is out of order."""
    begin = 0.0
    for number, entry in enumerate(declared, 1):
        if not isinstance(entry, dict) or not set(entry) <= {*_ENTRIES}:
            raise _error(number, f"{entry!a}: it has {', '.join(_ENTRIES)} alone.")
        is_last = number == len(declared)
        until: Any = entry.get("until", 1.0 if is_last else None)
        if not _is_number(until, float) or not begin < until <= 1.0:
            raise _error(
                number,
                f"until = {until!a}: it is the part of the steps at which the stage "
                f"ends, above {begin} where it begins, and at most 1.",
            )
        if is_last and until != 1.0:
            raise _error(number, f"until = {until}: the last one lasts to the end.")
        size = entry.get("image_size", 1)
        if not _is_number(size, int) or size < 1:
            raise _error(number, f"image_size = {size!a}: it is a whole number, as 24.")
        frozen = entry.get("frozen", [])
        if not isinstance(frozen, list) or not all(isinstance(n, str) for n in frozen):
            raise _error(
                number,
                f"frozen = {frozen!a}: it is a list of variables or layers, as "
                '["whitening/bias"].',
            )
        begin = until


def is_frozen(path: str, names: Sequence[str]) -> bool:
    """Returns whether a variable, or a layer that has it, is among the names."""
    return any(f"{path}/".startswith(f"{name}/") for name in names)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, int | kind) and not isinstance(value, bool)


def _error(number: int, problem: str) -> UsageError:
    return UsageError(f"stage {number} of the recipe: {problem}")
