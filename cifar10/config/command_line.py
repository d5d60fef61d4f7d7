"""Command lines of the training scripts, with flags left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

from cifar10.config.config import Config


def without(command: Sequence[str], *names: str) -> list[str]:
    """Returns a command without the flags of some fields of `Config`."""
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
