"""Command-line flags made from declared options."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cifar10.config import fields
from cifar10.config.config import Config
from cifar10.config.options import names, options, types
from cifar10.errors import UsageError, did_you_mean
from cifar10.process import invocation

_RESUME = (
    "continue the run in DIR as its config.json says; flags beside it may only change "
    "what leaves the result as it is, as --max_steps and --num_gpus do"
)
_WIDEST = 74  # Characters of a flag with its choices; a terminal has 80.
_UNITS = {int: "N", float: "X", str: "S"}
_END_OF_HELP = "{count} more flags, by subject: {command} --help_all"
_END_OF_HELP_ALL = (
    "TensorFlow's own messages are hidden unless the environment variable\n"
    "TF_CPP_MIN_LOG_LEVEL is set to 0, 1 or 2."
)


class _Single(argparse.Action):
    """Stores a value; refuses `--flag=--`, which argparse stores as an empty list."""

    def __call__(self, _: Any, namespace: Any, values: Any, __: Any = None) -> None:
        if values == [] and self.option_strings:
            raise argparse.ArgumentError(self, "expected one argument")
        setattr(namespace, self.dest, values)


def described(text: str) -> dict[str, Any]:
    """Returns the arguments of a parser for a program with this description."""
    return {
        # The name under which the program was started.
        "description": text.replace("python -m cifar10", invocation.program_name()),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_flags(
    parser: argparse.ArgumentParser,
    declared: Any,
    *,
    leave_out: Collection[str] = (),
    hide: Collection[str] = (),
    subjects: Mapping[str, str] | None = None,
) -> dict[str | None, Any]:
    """Adds a flag for each option of a class, or of several.

    A flag that is not given sets no attribute. The options in `leave_out` get no flag,
    and the help does not show those in `hide`. Returns the groups of flags by their
    `subjects`, which are the headings of the help.
    """
    hints = types(declared)
    parser.register("action", None, _Single)
    groups: dict[str | None, Any] = {None: parser}
    for field in options(declared):
        if field.name in leave_out or not field.metadata["in_flags"]:
            continue
        subject = subjects[field.name] if subjects else None
        if subject not in groups:
            groups[subject] = parser.add_argument_group(subject)
        _add_flag(groups[subject], field, hints[field.name], hidden=field.name in hide)
    return groups


def _add_flag(group: Any, field: dataclasses.Field, hint: Any, *, hidden: bool) -> None:
    help_text = field.metadata["help"].replace("%", "%%")
    required = field.default is dataclasses.MISSING
    if not required and "default:" not in help_text:
        help_text += f" (default: {field.default})"
    details: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if hint is not bool:
        choices = field.metadata["choices"]
        # If the choices do not fit, the help of the flag names them.
        fits = len(field.name) + len(",".join(choices or ())) < _WIDEST
        details = {
            "type": _converter(hint),
            "choices": choices,
            "metavar": None if choices and fits else _UNITS[_converter(hint)],
        }
    group.add_argument(
        f"--{field.name}",
        default=argparse.SUPPRESS,
        required=required,
        help=argparse.SUPPRESS if hidden else help_text,
        **details,
    )
    if alias := field.metadata["alias"]:
        group.add_argument(
            f"--{alias}",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **details,
        )


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Returns the options that a command line gives, by name.

    An unknown flag ends the program with exit code 2, and the name of the closest one.
    """
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        # argparse has no other public list of its flags.
        known = re.findall(r"^  (--\w+)", parser.format_help(), re.MULTILINE)
        meant = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(
            f"{' '.join(unknown)}: there is no such flag.{meant} {parser.prog} --help "
            "lists them."
        )
    return vars(arguments)


def from_flags(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    **fixed: Any,
) -> Config:
    """Parses `sys.argv`, or `arguments`; a bad value ends the program with exit code 2.

    `--help` lists the main flags, `--help_all` all. The script decides the fields in
    `fixed`, and has no flags for them.
    """
    # A list of all flags would bury the error message.
    parser.usage = "%(prog)s [FLAGS]; --help lists them"
    parser.add_argument("--help_all", action="help", help="show all flags, by subject")
    show_all = "--help_all" in sys.argv
    subjects = fields.subjects()
    rest = {
        name
        for name in names(fields.ALL, in_flags=True) - set(fixed)
        if subjects[name] != fields.MAIN
    }
    groups = add_flags(
        parser,
        fields.ALL,
        leave_out=fixed,
        hide=() if show_all else rest,
        subjects=subjects,
    )
    groups[fields.MAIN].add_argument(
        "--resume", metavar="DIR", default=argparse.SUPPRESS, help=_RESUME
    )
    is_script = parser.prog.endswith(".py")
    command = f"python {parser.prog}" if is_script else parser.prog
    parser.epilog = (
        _END_OF_HELP_ALL
        if show_all
        else _END_OF_HELP.format(count=len(rest), command=command)
    )
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unknown(unknown, parser, fixed))
    try:
        return Config(**{**vars(given), **fixed})
    except UsageError as error:
        parser.error(str(error))


def _unknown(
    arguments: Sequence[str], parser: argparse.ArgumentParser, fixed: Iterable[str]
) -> str:
    """Returns the error message for arguments that the parser does not know."""
    name, given = arguments[0].partition("=")[0], " ".join(arguments)
    if name.removeprefix("--") in fixed:
        return f"{given}: this script decides it; train_multi_gpu.py has that flag."
    if (field := name.removeprefix("--")) in names(fields.ALL, in_flags=False):
        return f"{given}: {field} is set in a recipe (--recipe FILE), not by a flag."
    known = [f"--{known}" for known in names(fields.ALL, in_flags=True)]
    meant = did_you_mean(name, known)
    return (
        f"{given}: there is no such flag.{meant} {parser.prog} --help_all lists them."
    )


def without(command: Sequence[str], *names_left_out: str) -> list[str]:
    """Returns a command line without the flags of some fields of `Config`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, fields.ALL, leave_out=names(fields.ALL) - set(names_left_out))
    _, rest = parser.parse_known_args(command)
    return rest


def _converter(hint: Any) -> type:
    """Returns the type of a flag's value, for `int`, `str | None` and so on."""
    if isinstance(hint, type):
        return hint
    return next(part for part in hint.__args__ if part is not type(None))
