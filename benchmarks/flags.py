"""Flags, and checks of flags, that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from cifar10.errors import UsageError

_Row = TypeVar("_Row")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, `--markdown` and `--plot`."""
    for name, what in (("json", "everything"), ("markdown", "the tables")):
        parser.add_argument(f"--{name}", type=Path, help=f"write {what} to this file")
    parser.add_argument("--plot", type=Path, help="draw the plots into this PNG file")


def check_files(flags: argparse.Namespace) -> None:
    """Refuses files that could not be written after a long measurement.

    Args:
        flags: Parsed ones, of which `json`, `markdown` and `plot` are looked at.

    Raises:
        UsageError: The folder of one is missing.
    """
    for name in ("json", "markdown", "plot"):
        path = getattr(flags, name, None)
        if path and not path.absolute().parent.is_dir():
            raise UsageError(
                f"--{name} {path}: there is no folder {path.absolute().parent}; "
                "create it first."
            )


def check_at_least_one(flags: argparse.Namespace, *names: str) -> None:
    """Refuses numbers below 1.

    Args:
        flags: Parsed ones.
        *names: Of those that are looked at.

    Raises:
        UsageError: One is smaller.
    """
    for name in names:
        if getattr(flags, name) < 1:
            raise UsageError(f"--{name} {getattr(flags, name)}: it is at least 1.")


def select(
    rows: Sequence[_Row],
    wanted: Sequence[str],
    name_of: Callable[[_Row], str],
    flag: str = "only",
) -> list[_Row]:
    """Returns the rows whose name contains one of some words, all if there are none.

    Args:
        rows: To choose from.
        wanted: What the flag got.
        name_of: From a row to its name.
        flag: The flag's name.

    Raises:
        UsageError: Some words are in no name.
    """
    for words in wanted:
        if not any(words.lower() in name_of(row).lower() for row in rows):
            names = "\n  ".join(name_of(row) for row in rows)
            raise UsageError(
                f"--{flag} {words!r}: no row is called so. A part of one of these "
                f"names is enough:\n  {names}"
            )
    return [
        row
        for row in rows
        if not wanted or any(words.lower() in name_of(row).lower() for words in wanted)
    ]
