"""Turns directories that flags name into absolute paths."""

import os
from pathlib import Path

from cifar10.errors import UsageError

# The file that makes a directory a run's, and the folders in it.
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
TRAIN_EVENTS = "train"
EVALUATION_EVENTS = "eval"


def locate(name: str) -> Path:
    """Returns the absolute path of a directory that a flag names."""
    expanded = os.path.expanduser(name)  # noqa: PTH111 - which raises other errors.
    if expanded.startswith("~"):
        user, here = name.partition("/")[0], f"./{name}"
        raise UsageError(f"{name}: there is no home folder {user}. Is it {here}?")
    try:
        # Links are not resolved: --fresh moves the link aside.
        return Path(os.path.abspath(expanded))  # noqa: PTH100
    except OSError as error:
        raise UsageError(f"{name}: the current directory was deleted.") from error


def locate_run(name: str) -> Path:
    """Returns the absolute path of a run's directory; `name` may be a folder in it."""
    path = locate(name)
    if os.path.isdir(path) and not os.path.exists(path / CONFIG):  # noqa: PTH110, PTH112
        folders = (CHECKPOINTS, TRAIN_EVENTS, EVALUATION_EVENTS)
        for inner in (path, path.parent):
            if inner.name in folders and os.path.isfile(inner.parent / CONFIG):  # noqa: PTH113
                return inner.parent
    return path
