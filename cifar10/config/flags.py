"""Flags from declared options, and recipes of their values.

A recipe is a TOML file of fields and values, in `recipes/` or anywhere. It overrides
the defaults; flags that are given override the recipe.
"""

import argparse
import dataclasses
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from cifar10.config import data_flag, run_config
from cifar10.config.config import FIRST, Config
from cifar10.config.options import is_a, names, options
from cifar10.errors import UsageError, did_you_mean, reason
from cifar10.process import files, invocation

_RECIPES = Path(__file__).parent / "recipes"
_LONGEST_RECIPE = (
    50_000  # Bytes; Python reads a name of thousands of parts for minutes.
)
# Recipes of models that the tutorial's does not suit.
_OF_MODELS = {"airbench": "fast", "resnet": "resnet"}

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
    """Stores a value; argparse alone would find none in `--flag=--`."""

    def __call__(self, _: Any, namespace: Any, values: Any, __: Any = None) -> None:
        if values == [] and self.option_strings:
            raise argparse.ArgumentError(self, "expected one argument")
        setattr(namespace, self.dest, values)


def described(text: str) -> dict[str, Any]:
    """Returns what a parser takes besides its name, for a program with this text."""
    return {
        # As the program was started.
        "description": text.replace("python -m cifar10", invocation.program_name()),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_flags(
    parser: argparse.ArgumentParser,
    declared: type,
    *,
    leave_out: Collection[str] = (),
    hide: Collection[str] = (),
) -> dict[str | None, Any]:
    """Adds a flag for each option of a class; those not given leave no trace.

    The options in `leave_out` get no flag, and the help does not show those in `hide`.
    Returns the groups of flags by section.
    """
    types = get_type_hints(declared)
    parser.register("action", None, _Single)
    groups: dict[str | None, Any] = {None: parser}
    for field in options(declared):
        if field.name in leave_out or not field.metadata["in_flags"]:
            continue
        section = field.metadata["section"]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        _add_flag(groups[section], field, types[field.name], hidden=field.name in hide)
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
        # argparse has no other public way to tell what it knows.
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
    # A list of all flags would bury the sentence that says what is wrong.
    parser.usage = "%(prog)s [FLAGS]; --help lists them"
    parser.add_argument("--help_all", action="help", help="show all flags, by subject")
    show_all = "--help_all" in sys.argv
    first = names(Config, section=FIRST)
    rest = names(Config, in_flags=True) - first - set(fixed)
    groups = add_flags(parser, Config, leave_out=fixed, hide=() if show_all else rest)
    groups[FIRST].add_argument(
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
        return with_recipe({**vars(given), **fixed})
    except UsageError as error:
        parser.error(str(error))


def _unknown(
    arguments: Sequence[str], parser: argparse.ArgumentParser, fixed: Iterable[str]
) -> str:
    """Says what is wrong with arguments that the parser does not know."""
    name, given = arguments[0].partition("=")[0], " ".join(arguments)
    if name.removeprefix("--") in fixed:
        return f"{given}: this script decides it; train_multi_gpu.py has that flag."
    if (field := name.removeprefix("--")) in names(Config, in_flags=False):
        return f"{given}: {field} is set in a recipe (--recipe FILE), not by a flag."
    known = [f"--{known}" for known in names(Config, in_flags=True)]
    meant = did_you_mean(name, known)
    return (
        f"{given}: there is no such flag.{meant} {parser.prog} --help_all lists them."
    )


def with_recipe(given: dict[str, Any]) -> Config:
    """Makes a configuration of the given values, and the recipe's for all others.

    If `resume`, a run's directory, is among them, that run takes the recipe's place.
    """
    if {"batch_size", "global_batch_size"} <= set(given):
        raise UsageError(
            "--batch_size and --global_batch_size say the same thing; give one of them."
        )
    given = data_flag.located(given)
    if "resume" in given:
        given = {**given}
        base = run_config.config_to_resume(given.pop("resume"), given)
    else:
        of_data = "pictures" if data_flag.is_own(given.get("data", "auto")) else None
        default = _OF_MODELS.get(given.get("model", ""), of_data or "tutorial")
        if given.get("initial_weights"):
            default = "finetune"
        name = given.get("recipe", default)
        base = {**read_recipe(name), "recipe": name}
    if "batch_size" in given:  # It overrides the recipe's.
        base.pop("global_batch_size", None)
    return Config(**{**base, **given})


def without(command: Sequence[str], *fields: str) -> list[str]:
    """Returns a command line without the flags of some fields of `Config`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, Config, leave_out=names(Config) - set(fields))
    _, rest = parser.parse_known_args(command)
    return rest


def read_recipe(name: str) -> dict[str, Any]:
    """Returns the values of a recipe, by field; its name may be a file's path."""
    known = {path.stem: path for path in sorted(_RECIPES.glob("*.toml"))}
    path = known.get(name, Path(name))
    try:
        content = files.read(path, _LONGEST_RECIPE, follow=True)
        values = tomllib.loads(content.decode())
        str(values)  # Python writes no number of thousands of digits.
    except FileNotFoundError as error:
        raise UsageError(
            f"--recipe {name}: there is no such recipe and no such file."
            f"{did_you_mean(name, known)} Known are {', '.join(known)}."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--recipe {name}: it cannot be read ({reason(error)}). A recipe is a TOML "
            "file like those in cifar10/config/recipes."
        ) from error
    types = get_type_hints(Config)
    possible = names(Config, in_recipes=True)
    for field, value in values.items():
        if field in types and field not in possible:
            raise UsageError(
                f"--recipe {name}: it cannot decide {field}. Take it out of the file, "
                f"and give --{field} on the command line."
            )
        if field not in types:
            raise UsageError(
                f"--recipe {name}: there is no flag {field}."
                f"{did_you_mean(field, possible)} Correct it or take it out."
            )
        if not is_a(value, types[field]):
            raise UsageError(
                f"--recipe {name}: {field} = {value!r} is not of type "
                f"{_converter(types[field]).__name__}."
            )
    return values


def _converter(hint: Any) -> type:
    """Returns the type of a flag's value, for `int`, `str | None` and so on."""
    if isinstance(hint, type):
        return hint
    return next(part for part in hint.__args__ if part is not type(None))
