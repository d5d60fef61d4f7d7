"""Names the files of a run, and resolves the paths that flags name."""

import os
from pathlib import Path

from cifar10.errors import UsageError

# This file makes a directory the directory of a run. The other names below are those of
# files and folders beside it.
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
DEBUG_CHECKPOINTS = "debug"
TRAIN_EVENTS = "train"
EVALUATION_EVENTS = "eval"
METRICS = "metrics.jsonl"
CORRECTIONS = "corrections.csv"  # Written by `data`, with a page of the pictures.


def evaluation_events(split: str) -> str:
    """Returns the folder for a split's scores: `eval` for test, else `eval_SPLIT`."""
    return EVALUATION_EVENTS + ("" if split == "test" else f"_{split}")


def absolute_path(name: str) -> Path:
    """Returns the absolute path that a flag names; `~` and `~user` are home folders."""
    expanded = os.path.expanduser(name)  # noqa: PTH111 - pathlib raises other errors.
    if expanded.startswith("~"):
        user, here = name.partition("/")[0], f"./{name}"
        raise UsageError(f"{name}: no home folder {user}. Did you mean {here}?")
    try:
        # Links are not resolved, so that --fresh moves a link aside, not its target.
        return Path(os.path.abspath(expanded))  # noqa: PTH100
    except OSError as error:
        raise UsageError(f"{name}: the current directory was deleted.") from error


def locate_run(name: str) -> Path:
    """Returns a run's absolute path. `name` is its directory or a folder inside."""
    path = absolute_path(name)
    if os.path.isdir(path) and not os.path.exists(path / CONFIG):  # noqa: PTH110, PTH112
        folders = (CHECKPOINTS, TRAIN_EVENTS, EVALUATION_EVENTS)
        for inner in (path, path.parent):
            if inner.name in folders and os.path.isfile(inner.parent / CONFIG):  # noqa: PTH113
                return inner.parent
    return path


def refuse_link(folder: Path) -> None:
    """Refuses to write to a folder of a run if the folder is a link."""
    if folder.is_symlink():
        raise UsageError(
            f"{folder} is a link, but a run writes only inside its directory.\nReplace "
            "the link with the folder that it points to. The directory of the run may "
            "be a link."
        )
