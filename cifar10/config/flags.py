"""The command line: a flag for every field of `Config`, and recipes of their values.

A recipe is a TOML file of fields and values, in `recipes/` or anywhere. It takes the
place of the defaults; flags that are given take the place of the recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from cifar10.config.config import Config
from cifar10.config.config_file import is_a
from cifar10.errors import UsageError

_RECIPES = Path(__file__).parent / "recipes"

# What a recipe may not decide: it is the user's or the machine's.
_NOT_IN_RECIPES = {
    "data_dir",
    "fresh",
    "local_workers",
    "max_restarts",
    "memory_limit",
    "num_gpus",
    "recipe",
    "train_dir",
    "use_fp16",
    "worker_timeout",
}


def add_flags(
    parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()
) -> None:
    """Adds a flag for every field of `Config`; those not given leave no trace."""
    types = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        if field.name in leave_out:
            continue
        help_text = field.metadata["help"].replace("%", "%%")
        if "default:" not in help_text:
            help_text += f" (default: {field.default})"
        if types[field.name] is bool:
            parser.add_argument(
                f"--{field.name}",
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
            continue
        parser.add_argument(
            f"--{field.name}",
            type=_converter(types[field.name]),
            default=argparse.SUPPRESS,
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else _unit(types[field.name]),
            help=help_text,
        )


def from_flags(parser: argparse.ArgumentParser, **fixed: Any) -> Config:
    """Parses the command line; a bad value ends the program with exit code 2.

    Args:
        parser: A parser; flags for the fields that `fixed` does not name are added.
        **fixed: Fields that the script decides.
    """
    # All flags would hide the sentence that says what is wrong.
    parser.usage = "%(prog)s [FLAGS]; --help lists them"
    add_flags(parser, leave_out=tuple(fixed))
    given, unknown = parser.parse_known_args()
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
    name, said = arguments[0].partition("=")[0], " ".join(arguments)
    if name.removeprefix("--") in fixed:
        return f"{said}: this script decides it; train_multi_gpu.py has that flag."
    known = [f"--{field.name}" for field in dataclasses.fields(Config)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{said}: there is no such flag.{hint} {parser.prog} --help lists them."


def with_recipe(given: dict[str, Any]) -> Config:
    """Makes a configuration of what was given, and the recipe for what was not.

    Raises:
        UsageError: A value is wrong, or values contradict each other.
    """
    if {"batch_size", "global_batch_size"} <= set(given):
        raise UsageError(
            "--batch_size and --global_batch_size say the same thing; give one of them."
        )
    recipe = read_recipe(given["recipe"]) if "recipe" in given else {}
    if "batch_size" in given:  # It takes the place of the recipe's.
        recipe.pop("global_batch_size", None)
    if given.get("use_fp16"):
        recipe.pop("precision", None)
    return Config(**{**recipe, **given})


def read_recipe(name: str) -> dict[str, Any]:
    """Reads a recipe.

    Args:
        name: `tutorial`, `fast`, or the path of a TOML file.

    Returns:
        Values of fields of `Config`, by name.

    Raises:
        UsageError: There is no such recipe, or it is not one.
    """
    known = {path.stem: path for path in sorted(_RECIPES.glob("*.toml"))}
    path = known.get(name, Path(name))
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"--recipe {name}: there is no such recipe and no such file. Known are "
            f"{', '.join(known)}."
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--recipe {name}: it cannot be read ({error}). A recipe is a TOML file "
            "like those in cifar10/config/recipes."
        ) from error
    types = get_type_hints(Config)
    for field, value in values.items():
        if field in _NOT_IN_RECIPES:
            raise UsageError(
                f"--recipe {name}: it cannot decide {field}. Take it out of the file, "
                f"and give --{field} on the command line."
            )
        if field not in types:
            near = difflib.get_close_matches(field, set(types) - _NOT_IN_RECIPES, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"--recipe {name}: there is no flag {field}.{hint} Correct it or take "
                "it out."
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


def _unit(hint: Any) -> str:
    return {int: "N", float: "X", str: "S"}[_converter(hint)]
