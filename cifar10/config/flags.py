"""Makes command-line flags from declared options."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from cifar10.config import fields
from cifar10.config.config import Config
from cifar10.config.options import Option, options
from cifar10.errors import UsageError
from cifar10.process import invocation

_UNITS = {int: "N", float: "X", str: "S"}
# The tutorial's names for flags. The help does not show them.
_ALIASES = {"train_dir": "checkpoint_dir"}


def described(text: str | None) -> dict[str, Any]:
    """Returns arguments of `ArgumentParser` for a program with this description.

    The description names commands as `python -m cifar10 NAME`; the help names them as
    the user has started this one. `text` is None if `python -OO` drops docstrings.
    """
    name, command = invocation.program_name(), "python -m cifar10"
    if name.endswith(".py"):
        name, command = f"python {name}", rf"{command} \w+"
    text, kind = re.sub(command, name, text or ""), argparse.RawDescriptionHelpFormatter
    return {"description": text, "formatter_class": kind, "allow_abbrev": False}


def add_flags(
    parser: argparse.ArgumentParser, declared: Any, only: Collection[str] | None = None
) -> None:
    """Adds a flag for each option, or each in `only`, of one or several classes.

    A flag that the user does not give sets no attribute.
    """
    for name, one in options(declared).items():
        if one.in_flags and (only is None or name in only):
            _add_flag(parser, one)


def _add_flag(group: Any, declared: Option, *, hidden: bool = False) -> None:
    help_text = declared.help.replace("%", "%%")
    required = declared.default is dataclasses.MISSING
    if not required and "default:" not in help_text:
        help_text += f" (default: {declared.default})"
    details: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    # `int` for both `int` and `int | None`.
    if (kind := getattr(declared.type, "__args__", (declared.type,))[0]) is not bool:
        # `Config` checks the choices, as it does for recipes and programs.
        choices = ",".join(declared.choices)
        metavar = f"{{{choices}}}" if choices else _UNITS[kind]
        details = {"type": kind, "metavar": metavar}
    details |= {"dest": declared.name, "default": argparse.SUPPRESS}
    shown = argparse.SUPPRESS if hidden else help_text
    group.add_argument(f"--{declared.name}", required=required, help=shown, **details)
    if alias := _ALIASES.get(declared.name):
        group.add_argument(f"--{alias}", help=argparse.SUPPRESS, **details)


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str] | None
) -> dict[str, Any]:
    """Parses a command line, and returns the given options by name."""
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(_why_unknown(parser, unknown))
    return vars(arguments)


def _why_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Returns an error message that suggests the closest known flags."""
    names = [word.partition("=")[0].lstrip("-") for word in unknown if word[:1] == "-"]
    if not names:
        return f"unrecognized arguments: {' '.join(unknown)}"
    # argparse has no other list of its flags that includes those without help.
    listed = parser._option_string_actions  # noqa: SLF001
    known = [flag[2:] for flag in listed if flag.startswith("--")]
    one = options(fields.ALL).get(names[0])
    if one and one.in_recipes and not one.in_flags and "recipe" in known:
        fix = "it is set in a recipe (--recipe FILE), not by a flag."
    elif one and one.in_flags:
        fix = f"{parser.prog} has no such flag. train_multi_gpu.py has it."
    else:
        found = [f"--{flag}" for name in names for flag in _closest(name, known)]
        hint = f"Did you mean {' and '.join(found)}?" if found else "See --help."
        fix = f"there is no such flag. {hint}"
    return f"{' '.join(unknown)}: {fix}"


def _closest(name: str, known: Sequence[str]) -> list[str]:
    """Returns the flag most like `name`, else one that has it as a word or initials."""
    words = {flag: flag.split("_") for flag in known}
    meant = [f for f in known if name in (*words[f], "".join(w[:1] for w in words[f]))]
    return get_close_matches(name, known, n=1) or meant[:1]


def from_flags(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None, **fixed: Any
) -> Config:
    """Builds a configuration from `words`, or from `sys.argv`.

    A bad value ends the program with exit code 2. `--help` lists the main flags, and
    `--help_all` lists all. `fixed` holds values of fields that get no flag.
    """
    # A list of all flags would bury the error message.
    parser.usage = "%(prog)s [FLAGS]; --help lists the flags"
    parser.add_argument("--help_all", action="help", help="show all flags, by subject")
    show_all = "--help_all" in sys.argv
    main = parser.add_argument_group("main flags")
    for section in fields.ALL:
        subject = (section.__doc__ or "").partition("\n")[0].rstrip(".")
        group = parser.add_argument_group(subject)
        for name, one in options(section).items():
            if name in fixed or not one.in_flags:
                continue
            is_main = name in fields.MAIN
            _add_flag(main if is_main else group, one, hidden=not (is_main or show_all))
    _add_flag(main, fields.RESUME)
    try:
        return Config(**{**parse(parser, words), **fixed})
    except UsageError as error:
        parser.error(str(error))


def without(command: Sequence[str], *names_left_out: str) -> list[str]:
    """Returns a command line without the flags of the named fields of `Config`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, fields.ALL, names_left_out)
    _, rest = parser.parse_known_args(command)
    return rest
