"""How a field of a configuration is declared, and how its value is checked."""

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from cifar10.errors import UsageError, reason

_LARGEST_INTEGER = 10**12  # Far above any sensible value: a typing error.
LARGEST_NUMBER = 1e30  # Likewise; float32 holds it.
_MOST_DIGITS = 30  # Python refuses to convert thousands of digits.


class Scope(enum.Enum):
    """Where a value has to be the same."""

    # On all workers and whenever the run is resumed: it determines the result.
    RESULT = enum.auto()
    SESSION = enum.auto()  # On all workers; a resumed run may change it.
    WORKER = enum.auto()  # Nowhere; each worker has a value of its own.


def option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    number_or: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    alias: str | None = None,
    scope: Scope = Scope.SESSION,
    result_if: tuple[str, tuple] | None = None,
    in_recipes: bool = True,
    in_flags: bool = True,
    affects_memory: bool = False,
    for_evaluation: bool = False,
) -> Any:
    """Declares a field of a configuration, and so a flag unless not `in_flags`.

    With `dataclasses.MISSING` as its default the flag is required. `number_or` is a
    word that is allowed in place of a whole number; `alias` is another name of the
    flag, hidden in the help. `result_if` names another field and its values with which
    this field determines the result too. The memory of a step depends on a field that
    `affects_memory`. A run is not evaluated if its `config.json` lacks a field that is
    `for_evaluation`.
    """
    return dataclasses.field(
        default=default,
        kw_only=default is dataclasses.MISSING,
        metadata={
            "help": help_text,
            "choices": choices,
            "number_or": number_or,
            "minimum": minimum,
            "maximum": maximum,
            "alias": alias,
            "scope": scope,
            "result_if": result_if,
            "in_recipes": in_recipes,
            "in_flags": in_flags,
            "affects_memory": affects_memory,
            "for_evaluation": for_evaluation,
        },
    )


def options(declared: Any) -> list[dataclasses.Field]:
    """Returns the fields of a class, or of several, that are declared by `option`."""
    classes = declared if isinstance(declared, tuple) else (declared,)
    return [
        field
        for one_class in classes
        for field in dataclasses.fields(one_class)
        if field.metadata
    ]


def types(declared: Any) -> dict[str, Any]:
    """Returns the types of the fields of a class, or of several, by name."""
    classes = declared if isinstance(declared, tuple) else (declared,)
    found: dict[str, Any] = {}
    for one_class in classes:
        found |= get_type_hints(one_class)
    return found


def defaults(declared: Any) -> dict[str, Any]:
    """Returns the defaults of the fields of a class, or of several, by name."""
    return {field.name: field.default for field in options(declared)}


def names(declared: Any, **metadata: Any) -> set[str]:
    """Returns the names of the fields that were declared with these arguments."""
    return {
        field.name
        for field in options(declared)
        if metadata.items() <= {**field.metadata}.items()
    }


def result_determining(
    declared: Any, entries: Mapping[str, Any] | None = None
) -> list[str]:
    """Returns the names of the fields that a resumed run must not change.

    Fields with `result_if` are included if the run's `entries` meet the condition.
    """
    entries = entries or {}
    return [
        field.name
        for field in options(declared)
        if field.metadata["scope"] is Scope.RESULT
        or _is_result(field.metadata["result_if"], entries)
    ]


def _is_result(result_if: tuple[str, tuple] | None, entries: Mapping[str, Any]) -> bool:
    if result_if is None:
        return False
    name, values = result_if
    return name in entries and entries[name] in values


def is_whole_number(text: str) -> bool:
    """Returns whether a text is a whole number, 0 or larger."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def is_count(text: str) -> bool:
    """Returns whether a text is a whole number, 1 or larger."""
    return is_whole_number(text) and int(text) > 0


def is_a(value: Any, hint: Any) -> bool:
    """Returns whether a value has a type; an int is accepted as a float."""
    if isinstance(value, int) and float in (hint, *get_args(hint)):
        return not isinstance(value, bool)
    if get_origin(hint) is list:
        (of_items,) = get_args(hint)
        return isinstance(value, list) and all(is_a(item, of_items) for item in value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Returns whether a value is a number from -1e30 to 1e30, and no boolean."""
    return is_a(value, float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def check(configuration: Any) -> None:
    """Refuses values that are empty, not among the choices, or outside the range."""
    for field in options(configuration):
        _check(field, getattr(configuration, field.name))


def _check(field: dataclasses.Field, value: Any) -> None:
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UsageError(f"--{field.name} {value}: it is one of {', '.join(choices)}.")
    if isinstance(value, str) and not value.isprintable():
        raise UsageError(
            f"--{field.name} {value!a}: it has unprintable characters. Type it again."
        )
    if value == "":
        raise UsageError(
            f"--{field.name}: it is empty. Give a value, or leave the flag out."
        )
    word = field.metadata["number_or"]
    if word and value not in (None, word) and not is_whole_number(str(value)):
        raise UsageError(f"--{field.name} {value}: it is a whole number, or {word}.")
    if value is None or isinstance(value, bool | str):
        return
    minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
    if maximum is None and isinstance(value, int):
        maximum = _LARGEST_INTEGER
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--{field.name} {value}: it has to be a finite number.")
    if minimum is not None and value < minimum:
        raise UsageError(f"--{field.name} {value}: the minimum is {minimum}.")
    if maximum is not None and value > maximum:
        raise UsageError(f"--{field.name} {value}: the maximum is {maximum}.")


def check_types(
    called: str, given: Mapping[str, Any], hints: Mapping[str, Any]
) -> None:
    """Refuses arguments of a wrong type, or that JSON cannot represent."""
    for name, value in given.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise UsageError(
                f"{called}: {name}, of type {kind}, cannot be written as JSON: "
                f"{reason(error)}. Give plain numbers, strings, lists and dicts; "
                "NumPy's become that by .item() and .tolist()."
            ) from error
        if not is_a(value, hints[name]):
            kind = getattr(hints[name], "__name__", hints[name])
            raise UsageError(f"{called}: {name}={value!r} is not of type {kind}.")
