"""Command lines of the training scripts, with flags left out or replaced."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import get_type_hints

from cifar10.config.config import Config


def without(command: Sequence[str], *names: str) -> list[str]:
    """Returns a command without some flags and their values.

    Args:
        command: The script and its flags.
        *names: Fields of `Config`.
    """
    takes_value = {
        f"--{name}": get_type_hints(Config)[name] is not bool for name in names
    }
    kept: list[str] = []
    skip = False
    for word in command:
        if skip:
            skip = False
        elif word in takes_value:
            skip = takes_value[word]
        elif word.partition("=")[0] not in takes_value:
            kept.append(word)
    return kept


def to_paste(command: Sequence[str], name: str, value: str | None = None) -> str:
    """Returns a command line for a shell, with a flag replaced or added.

    Args:
        command: The script and its flags.
        name: A field of `Config`.
        value: Its value; None for a flag without one.
    """
    flag = [f"--{name}"] if value is None else [f"--{name}", value]
    return shlex.join(["python", *without(command, name), *flag])
