"""Names and places of what a run's directory holds."""

from __future__ import annotations

import os
from pathlib import Path

from cifar10.errors import UsageError, reason

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
TRAIN_EVENTS = "train"
EVALUATION_EVENTS = "eval"


def locate(name: str) -> Path:
    """Returns the absolute path of a directory that a flag names."""
    try:
        # Links are not resolved: --fresh moves the link aside.
        return Path(os.path.abspath(os.path.expanduser(name)))  # noqa: PTH100, PTH111
    except OSError as error:
        raise UsageError(f"{name}: the current directory was deleted.") from error


def description(path: Path) -> bytes | None:
    """Returns the content of a run's `config.json`; None if it does not exist."""
    try:
        return (path / CONFIG).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"{path / CONFIG} cannot be read: {reason(error)}. Make it readable for "
            "this user, or name the directory of another run."
        ) from error
