"""Declares options as the fields of a class, and checks their values.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Output(Checked):
        log_frequency: Count = 10
        seed: Annotated[int, Range(0, 2**31 - 1), RESULT] = 0

The type says which values are valid: one of the words of a `Literal` or of `Choices`, a
number within a `Range`, or a string that matches a `Form`. `Annotated` can add a scope,
`FLAG_ONLY` or `RECIPE_ONLY` to a type. The text on an attribute in the docstring of the
class is the help of the flag. Flags, recipes, the arguments of `Config` and the entries
of `config.json` are all made from these declarations.
"""

import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from cifar10.errors import UsageError, has_controls, reason
from cifar10.models.registry import PYTHON

IN_PROGRAM = "a Python object. A run with one resumes from its program"
LARGEST_NUMBER = 1e30  # Far above any sensible value; float32 holds it.
_LARGEST_INTEGER = 10**12  # Likewise.
# An attribute in a docstring: a name, and a text of one or several lines.
_ATTRIBUTE = r"^ {4}(\w+): (.*(?:\n {8}.*)*)"


class Range(NamedTuple):
    """A range of valid numbers, including both limits."""

    minimum: float
    maximum: float = LARGEST_NUMBER

    def problem(self, value: float) -> str | None:
        """Returns the rule that a number breaks, or None if the number is valid."""
        if self.minimum <= value <= self.maximum:
            return None
        return f"give a number from {self.minimum} to {self.maximum}"


class Form(NamedTuple):
    """A regular expression for valid strings, and a description for error messages."""

    pattern: str
    words: str

    def problem(self, value: str) -> str | None:
        """Returns the rule that a string breaks, or None if the string is valid."""
        return None if re.fullmatch(self.pattern, value) else f"it must be {self.words}"


class Choices(NamedTuple):
    """Valid words, each with its part of the flag's help, which may be empty."""

    words: Mapping[str, str]

    @property
    def help(self) -> str:
        """The words that have help, to append to the attribute's text."""
        return "".join(f"; {word}: {text}" for word, text in self.words.items() if text)


class Help(NamedTuple):
    """Help for an option, in whole or in part, that no docstring can hold."""

    help: str


Count: TypeAlias = Annotated[int, Range(1, _LARGEST_INTEGER)]
CountOrZero: TypeAlias = Annotated[int, Range(0, _LARGEST_INTEGER)]
Fraction: TypeAlias = Annotated[float, Range(0.0, 1.0)]


# The scope of an option. An option of scope RESULT is the same on all workers and after
# a resume, because it determines the result. One of scope SESSION is the same on all
# workers, but a resumed run may change it. One of scope WORKER may differ anywhere.
RESULT, SESSION, WORKER = SCOPES = ("result", "session", "worker")

# The only way to set an option, apart from an argument of `Config`.
FLAG_ONLY, RECIPE_ONLY = "by a flag", "by a recipe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option, as declared by a field of a class."""

    name: str = ""  # The field's, the flag's and `config.json`'s.
    type: Any = None  # The values' type, without limits.
    choices: tuple[str, ...] = ()  # The valid words; empty if there are others.
    limits: tuple[Range | Form, ...] = ()
    default: Any = None  # `dataclasses.MISSING` if the flag is required.
    help: str = ""  # The text for the flag.
    scope: str = SESSION
    in_recipes: bool = True  # Whether a recipe may set the option.
    in_flags: bool = True  # Whether the option has a flag.

    def check(self, value: Any, source: str = "") -> None:
        """Refuses an invalid value; `source` is the beginning of the message."""
        if (problem := self._problem(value)) is not None:
            flag = f"--{self.name}" if self.in_flags else self.name
            shown = ascii(value) if has_controls(str(value)) else value
            raise UsageError(f"{source}{flag} {shown}: {problem}.")

    def _problem(self, value: Any) -> str | None:
        if not is_a(value, self.type):
            kinds = typing.get_args(self.type) or (self.type,)
            names = " or ".join(kind.__name__ for kind in kinds)
            return f"it is not of type {names.replace('NoneType', 'None')}"
        if callable(value):  # A function of a Python program, which has no limits.
            return None
        if self.choices and value not in self.choices:
            if str(value).startswith(PYTHON):  # As `config.json` records an object.
                return f"it must be {IN_PROGRAM}"
            return f"give one of {', '.join(self.choices)}"
        if value == "":
            return "the value is empty. Give a value, or leave out the option"
        if isinstance(value, str) and has_controls(value):
            return "the value has control characters. Type it again"
        if not isinstance(value, str | int | float | None):
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                return f"it cannot be written as JSON ({reason(error)})"
        limits = self.limits if value is not None else ()
        return next(filter(None, (limit.problem(value) for limit in limits)), None)


class Checked:
    """Base class of dataclasses whose keyword-only fields are options; checks values.

    The class argument `scope` is the default scope of the subclass's options. `numbers`
    declares options after the class's own: each by its default, limits and help.
    """

    scope: ClassVar[str] = SESSION

    def __init_subclass__(
        cls,
        scope: str = SESSION,
        numbers: Mapping[str, tuple[float, float, float, str]] | None = None,
    ) -> None:
        cls.scope = scope
        for name, (default, least, most, text) in (numbers or {}).items():
            hint: Any = Annotated[type(default), Range(least, most), Help(text)]
            cls.__annotations__[name] = hint
            setattr(cls, name, default)

    def __post_init__(self) -> None:
        declared: Any = type(self)
        for name, one in options(declared).items():
            one.check(getattr(self, name))


@functools.cache
def options(declared: Any) -> dict[str, Option]:
    """Returns the options of a class, or of a tuple of classes, by name."""
    if isinstance(declared, tuple):
        return {name: one for each in declared for name, one in options(each).items()}
    types = typing.get_type_hints(declared)
    hints = typing.get_type_hints(declared, include_extras=True)
    texts = _attribute_texts(declared)
    found = {}
    for field in [one for one in dataclasses.fields(declared) if one.kw_only]:
        plain = types[field.name]
        words = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
        marks = _marks(hints[field.name])
        further = [mark for mark in marks if isinstance(mark, Choices | Help)]
        listed = (tuple(mark.words) for mark in marks if isinstance(mark, Choices))
        found[field.name] = Option(
            name=field.name,
            type=str if words else plain,
            choices=words or next(listed, ()),
            limits=tuple(mark for mark in marks if isinstance(mark, Range | Form)),
            default=field.default,
            help=texts.get(field.name, "") + "".join(mark.help for mark in further),
            scope=next((mark for mark in marks if mark in SCOPES), declared.scope),
            in_recipes=FLAG_ONLY not in marks,
            in_flags=RECIPE_ONLY not in marks,
        )
    return found


def _marks(hint: Any) -> tuple[Any, ...]:
    """Returns the `Annotated` metadata of a type and of all types within it."""
    of_parts = (_marks(part) for part in typing.get_args(hint))
    return sum(of_parts, getattr(hint, "__metadata__", ()))


def _attribute_texts(declared: type) -> dict[str, str]:
    """Returns the text on each attribute in the docstrings of a class and its bases."""
    texts = {}
    for one in reversed(declared.__mro__):
        doc = one.__doc__ or ""
        if sys.flags.optimize > 1 and one is not object:  # -OO drops docstrings.
            tree: Any = ast.parse(inspect.getsource(one))
            doc = ast.get_docstring(tree.body[0]) or ""
        _, _, section = inspect.cleandoc(doc).partition("Attributes:\n")
        for name, text in re.findall(_ATTRIBUTE, section, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def defaults(declared: Any) -> dict[str, Any]:
    """Returns the defaults of the options of one or several classes, by name."""
    return {name: one.default for name, one in options(declared).items()}


def is_a(value: Any, hint: Any) -> bool:
    """Checks the type of a JSON value; ints count as floats, and lists as tuples."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is list:
        return isinstance(value, list) and all(is_a(item, *parts) for item in value)
    if kind is tuple:
        is_list = isinstance(value, list) and len(value) == len(parts)
        return is_list and all(map(is_a, value, parts))
    if kind is dict:
        is_dict = isinstance(value, dict)
        return is_dict and all(is_a(item, parts[1]) for item in value.values())
    if isinstance(value, bool):
        return bool in (hint, *parts)
    return isinstance(value, hint | int if float in (hint, *parts) else hint)
