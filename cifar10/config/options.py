"""How an option is declared, and how its values are checked.

    class Output(Checked):
        log_frequency: Count = option(10, "steps between two lines on the console")

The type says which values are valid: one of the words of a `Literal`, a number within
a `Range`, or a text in a `Form`. Flags, recipes, the arguments of `Config` and each
`config.json` all follow from the declarations.
"""

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from cifar10.errors import UsageError, reason

LARGEST_NUMBER = 1e30  # Far above any sensible value; float32 holds it.
_LARGEST_INTEGER = 10**12  # Likewise.


class Range(NamedTuple):
    """The numbers that are valid."""

    minimum: float
    maximum: float = LARGEST_NUMBER

    def problem(self, value: float) -> str | None:
        """Returns the rule that a number breaks; None if it is valid."""
        if self.minimum <= value <= self.maximum:
            return None
        if value != value:  # NaN.
            return "it has to be a finite number"
        name = "minimum" if value < self.minimum else "maximum"
        return f"the {name} is {getattr(self, name)}"


class Form(NamedTuple):
    """The texts that are valid: a regular expression, and how an error says it."""

    pattern: str
    words: str

    def problem(self, value: str) -> str | None:
        """Returns the rule that a text breaks; None if it is valid."""
        return None if re.fullmatch(self.pattern, value) else f"it is {self.words}"


Count: TypeAlias = Annotated[int, Range(1, _LARGEST_INTEGER)]
CountOrZero: TypeAlias = Annotated[int, Range(0, _LARGEST_INTEGER)]
Fraction: TypeAlias = Annotated[float, Range(0.0, 1.0)]


class Scope(enum.Enum):
    """Where a value has to be the same."""

    # On all workers and whenever the run is resumed: it determines the result.
    RESULT = enum.auto()
    SESSION = enum.auto()  # On all workers; a resumed run may change it.
    WORKER = enum.auto()  # Nowhere; each worker has a value of its own.


RESULT, SESSION, WORKER = Scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option as a field of a class declares it.

    Attributes:
        name: Its name, which is that of the flag and of the entry in `config.json`.
        type: The type of its values, without their limits.
        choices: The valid words; empty if any value of the type may be valid.
        limits: Ranges of numbers and forms of texts that its values have.
        default: Its default; `dataclasses.MISSING` if the flag is required.
        help: The help of the flag.
        scope: Where its value has to be the same.
        result_if: Another field, and values of it with which this one determines the
            result too.
        in_recipes: Whether a recipe may set it.
        in_flags: Whether it is a flag.
    """

    name: str = ""
    type: Any = None
    choices: tuple[str, ...] = ()
    limits: tuple[Range | Form, ...] = ()
    default: Any = None
    help: str = ""
    scope: Scope = SESSION
    result_if: tuple[str, tuple] | None = None
    in_recipes: bool = True
    in_flags: bool = True

    def check(self, value: Any, source: str = "") -> None:
        """Refuses a value that is not valid; `source` is where it is written, if any.

        Raises:
            UsageError: The message names the flag, the value and the rule.
        """
        if (problem := self._problem(value)) is not None:
            flag = f"--{self.name}" if self.in_flags else self.name
            shown = value if str(value).isprintable() else ascii(value)
            raise UsageError(f"{source}{flag} {shown}: {problem}.")

    def _problem(self, value: Any) -> str | None:
        if not is_a(value, self.type):
            kinds = [kind.__name__ for kind in get_args(self.type) or (self.type,)]
            kind = " or ".join(kinds).replace("NoneType", "None")
            return f"it is not of type {kind}"
        if self.choices and value not in self.choices:
            return f"it is one of {', '.join(self.choices)}"
        if value == "":
            return "it is empty. Give a value, or leave it out"
        if isinstance(value, str) and not value.isprintable():
            return "it has unprintable characters. Type it again"
        if not isinstance(value, str | int | float | None):
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                return (
                    f"it cannot be written as JSON ({reason(error)}). Give plain "
                    "numbers, strings, lists and dicts; NumPy's become that by .item() "
                    "and .tolist()"
                )
        limits = self.limits if value is not None else ()
        return next(filter(None, (limit.problem(value) for limit in limits)), None)


def option(default: Any, help_text: str, **details: Any) -> Any:
    """Declares an option as a field of a class; `details` are as in `Option`."""
    details = {"default": default, "help": help_text, **details}
    return dataclasses.field(default=default, kw_only=True, metadata=details)


class Checked:
    """A base for classes with options as their fields: refuses invalid values.

    The `details` of a class, as in `Option`, are those of each of its options that
    declares no others.
    """

    details: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **details: Any) -> None:
        cls.details = details

    def __post_init__(self) -> None:
        declared: Any = type(self)
        for name, one in options(declared).items():
            one.check(getattr(self, name))


@functools.cache
def options(declared: Any) -> dict[str, Option]:
    """Returns the options of a class, or of a tuple of classes, by name, in order."""
    if isinstance(declared, tuple):
        return {name: one for each in declared for name, one in options(each).items()}
    plain = get_type_hints(declared)
    hints = get_type_hints(declared, include_extras=True)
    found = {}
    for field in dataclasses.fields(declared):
        if not field.metadata:
            continue
        hint = hints[field.name]
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        # Those of `Count` and of `Count | None`.
        parts = (hint, *get_args(hint))
        found[field.name] = Option(
            name=field.name,
            type=str if choices else plain[field.name],
            choices=choices,
            limits=sum((getattr(part, "__metadata__", ()) for part in parts), ()),
            **{**declared.details, **field.metadata},
        )
    return found


def defaults(declared: Any) -> dict[str, Any]:
    """Returns the defaults of the options of a class, or of several, by name."""
    return {name: one.default for name, one in options(declared).items()}


def names(declared: Any, **details: Any) -> set[str]:
    """Returns the names of the options that are declared with these details."""
    return {
        name
        for name, one in options(declared).items()
        if details.items() <= vars(one).items()
    }


def result_determining(
    declared: Any, entries: Mapping[str, Any] | None = None
) -> list[str]:
    """Returns the names of the options that a resumed run must not change.

    Those with `result_if` are included if the run's `entries` meet the condition.
    """
    found = []
    for name, one in options(declared).items():
        other, values = one.result_if or ("", ())
        if one.scope is RESULT or (entries or {}).get(other) in values:
            found.append(name)
    return found


def is_a(value: Any, hint: Any) -> bool:
    """Returns whether a value of JSON has a type; an int is accepted as a float.

    A tuple's types are those of a list of this length.
    """
    if isinstance(value, int) and float in (hint, *get_args(hint)):
        return not isinstance(value, bool)
    if get_origin(hint) is list:
        (of_items,) = get_args(hint)
        return isinstance(value, list) and all(is_a(item, of_items) for item in value)
    if get_origin(hint) is tuple:
        of_each = get_args(hint)
        is_list = isinstance(value, list) and len(value) == len(of_each)
        return is_list and all(map(is_a, value, of_each))
    if get_origin(hint) is dict:
        _, of_items = get_args(hint)
        is_dict = isinstance(value, dict)
        return is_dict and all(is_a(item, of_items) for item in value.values())
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
