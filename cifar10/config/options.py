"""How a field of the configuration is declared, and how its value is checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from cifar10.errors import UsageError

_LARGEST_INTEGER = 10**12  # Far above what makes sense: a slip of the finger.


def option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    determines_result: bool = False,
) -> Any:
    """Declares a field of a configuration.

    Args:
        default: Its value where the flag is not given.
        help_text: What it means, with its unit.
        choices: The values it may take.
        minimum: The least value it may take.
        maximum: The largest value it may take.
        determines_result: Whether a run may only be resumed with the same value.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help_text,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "determines_result": determines_result,
        },
    )


def check(field: dataclasses.Field, value: Any) -> None:
    """Refuses a value that a field may not take.

    Raises:
        UsageError: It is none of the choices, or outside the range.
    """
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UsageError(f"--{field.name} {value}: it is one of {', '.join(choices)}.")
    if value == "":
        raise UsageError(
            f"--{field.name}: it is empty. Give a value, or leave the flag out."
        )
    if isinstance(value, str) and not value.isprintable():
        raise UsageError(
            f"--{field.name} {value!a}: it has unprintable characters. Type it anew."
        )
    if value is None or isinstance(value, bool | str):
        return
    minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
    if maximum is None and isinstance(value, int):
        maximum = _LARGEST_INTEGER
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--{field.name} {value}: it has to be a finite number.")
    if minimum is not None and value < minimum:
        raise UsageError(f"--{field.name} {value}: the least possible is {minimum}.")
    if maximum is not None and value > maximum:
        raise UsageError(f"--{field.name} {value}: the most possible is {maximum}.")


def result_determining(configuration: type) -> list[str]:
    """Returns the names of the fields that a resumed run must not change."""
    return [
        field.name
        for field in dataclasses.fields(configuration)
        if field.metadata["determines_result"]
    ]
