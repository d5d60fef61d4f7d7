"""Makes command-line flags from declared options."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cifar10.config import fields
from cifar10.config.config import Config
from cifar10.config.options import Option, names, options
from cifar10.errors import UsageError, did_you_mean
from cifar10.process import invocation

_WIDEST = 74  # Most characters of a flag with its choices; a terminal has 80.
_UNITS = {int: "N", float: "X", str: "S"}
# The tutorial's names for flags. The help does not show them.
_ALIASES = {"train_dir": "checkpoint_dir"}
_END_OF_HELP = "To see {count} more flags, by subject: {command} --help_all"
_END_OF_HELP_ALL = (
    "TensorFlow's own messages are hidden unless the environment variable\n"
    "TF_CPP_MIN_LOG_LEVEL is set to 0, 1 or 2."
)


class _Single(argparse.Action):
    """An argparse action that stores a value and refuses `--flag=--`.

    Before Python 3.13, argparse turns `--` into an empty list instead of a value.
    """

    def __call__(self, _: Any, namespace: Any, values: Any, __: Any = None) -> None:
        if values in ([], "--"):
            raise argparse.ArgumentError(self, "expected one argument")
        setattr(namespace, self.dest, values)


def described(text: str | None) -> dict[str, Any]:
    """Returns arguments of `ArgumentParser` for a program with this description.

    `python -OO` drops docstrings, and with them the description and the flags' help.
    """
    name = invocation.program_name()  # The name by which the user started the program.
    return {
        "description": (text or "").replace("python -m cifar10", name),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_flags(
    parser: argparse.ArgumentParser, declared: Any, *, leave_out: Collection[str] = ()
) -> None:
    """Adds a flag for each option of one or several classes, except `leave_out`.

    A flag that the user does not give sets no attribute.
    """
    for name, one in options(declared).items():
        if one.in_flags and name not in leave_out:
            _add_flag(parser, one)


def _add_flag(group: Any, declared: Option, *, hidden: bool = False) -> None:
    help_text = declared.help.replace("%", "%%")
    required = declared.default is dataclasses.MISSING
    if not required and "default:" not in help_text:
        help_text += f" (default: {declared.default})"
    details: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if declared.type is not bool:
        # Not argparse's `choices`, whose error suggests no closest word. Choices that
        # do not fit here are listed in the flag's help text.
        choices = ",".join(declared.choices)
        fits = len(declared.name) + len(choices) < _WIDEST
        # `int` for both `int` and `int | None`.
        kind = getattr(declared.type, "__args__", (declared.type,))[0]
        metavar = f"{{{choices}}}" if choices and fits else _UNITS[kind]
        details = {"action": _Single, "type": kind, "metavar": metavar}
    details |= {"dest": declared.name, "default": argparse.SUPPRESS}
    group.add_argument(
        f"--{declared.name}",
        required=required,
        help=argparse.SUPPRESS if hidden else help_text,
        **details,
    )
    if alias := _ALIASES.get(declared.name):
        group.add_argument(f"--{alias}", help=argparse.SUPPRESS, **details)


def parse(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    elsewhere: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> dict[str, Any]:
    """Parses a command line, and returns the given options by name.

    An unknown flag ends the program with exit code 2. The message is the flag's
    entry in `elsewhere`, or else suggests the closest flag. Flags in `hidden` are
    suggested too, although the help does not list them.
    """
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        misspelt = [word.partition("=")[0] for word in unknown if word[:2] == "--"]
        misspelt = misspelt or unknown[:1]
        # argparse has no other public list of its flags.
        known = {*re.findall(r"--\w+", parser.format_help())}
        known |= {f"--{name}" for name in hidden}
        hints = dict.fromkeys(did_you_mean(flag, known) for flag in misspelt)
        reason = f"there is no such flag.{''.join(hints)} {parser.prog} --help lists "
        reason += "the flags."
        reason = (elsewhere or {}).get(misspelt[0].removeprefix("--"), reason)
        parser.error(f"{' '.join(unknown)}: {reason}")
    return vars(arguments)


def from_flags(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    **fixed: Any,
) -> Config:
    """Builds a configuration from `arguments`, or from `sys.argv`.

    A bad value ends the program with exit code 2. `--help` lists the main flags, and
    `--help_all` lists all. `fixed` holds values of fields that get no flag.
    """
    # A list of all flags would bury the error message.
    parser.usage = "%(prog)s [FLAGS]; --help lists the flags"
    parser.add_argument("--help_all", action="help", help="show all flags, by subject")
    show_all = "--help_all" in sys.argv
    main = parser.add_argument_group("main flags")
    hidden = []
    for section in fields.ALL:
        subject = (section.__doc__ or "").partition("\n")[0].rstrip(".")
        group = parser.add_argument_group(subject)
        for name, one in options(section).items():
            if name in fixed or not one.in_flags:
                continue
            if name in fields.MAIN:
                _add_flag(main, one)
            else:
                _add_flag(group, one, hidden=not show_all)
                hidden.append(name)
    _add_flag(main, fields.RESUME)
    is_script = parser.prog.endswith(".py")
    command = f"python {parser.prog}" if is_script else parser.prog
    parser.epilog = (
        _END_OF_HELP_ALL
        if show_all
        else _END_OF_HELP.format(count=len(hidden), command=command)
    )
    in_recipes = "it is set in a recipe (--recipe FILE), not by a flag."
    decided = "this script has no such flag. Use train_multi_gpu.py, which has it."
    elsewhere = dict.fromkeys(names(fields.ALL, in_flags=False), in_recipes)
    elsewhere |= dict.fromkeys(fixed, decided)
    given = parse(parser, arguments, elsewhere, hidden)
    try:
        return Config(**{**given, **fixed})
    except UsageError as error:
        parser.error(str(error))


def without(command: Sequence[str], *names_left_out: str) -> list[str]:
    """Returns a command line without the flags of the named fields of `Config`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, fields.ALL, leave_out=names(fields.ALL) - set(names_left_out))
    _, rest = parser.parse_known_args(command)
    return rest
