"""Where the files of a run are, and which paths flags name."""

import os
from pathlib import Path

from cifar10.errors import UsageError

# The file that makes a directory a run's; the other names are of files and folders
# beside it.
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
DEBUG_CHECKPOINTS = "debug"
TRAIN_EVENTS = "train"
EVALUATION_EVENTS = "eval"
METRICS = "metrics.jsonl"
CORRECTIONS = "corrections.csv"  # By `data`; a page beside it shows the pictures.


def evaluation_events(split: str) -> str:
    """Returns the folder for the scores on a part: `eval` for those on test."""
    return EVALUATION_EVENTS + ("" if split == "test" else f"_{split}")


def absolute_path(name: str) -> Path:
    """Returns the absolute path that a flag names; `~` and `~user` are home folders."""
    expanded = os.path.expanduser(name)  # noqa: PTH111 - which raises other errors.
    if expanded.startswith("~"):
        user, here = name.partition("/")[0], f"./{name}"
        raise UsageError(f"{name}: no home folder {user}. Did you mean {here}?")
    try:
        # Links are not resolved: --fresh moves the link aside.
        return Path(os.path.abspath(expanded))  # noqa: PTH100
    except OSError as error:
        raise UsageError(f"{name}: the current directory was deleted.") from error


def locate_run(name: str) -> Path:
    """Returns the absolute path of a run's directory; `name` may be a folder in it."""
    path = absolute_path(name)
    if os.path.isdir(path) and not os.path.exists(path / CONFIG):  # noqa: PTH110, PTH112
        folders = (CHECKPOINTS, TRAIN_EVENTS, EVALUATION_EVENTS)
        for inner in (path, path.parent):
            if inner.name in folders and os.path.isfile(inner.parent / CONFIG):  # noqa: PTH113
                return inner.parent
    return path


def refuse_link(folder: Path) -> None:
    """Refuses to write to a folder of a run that is a link out of it."""
    if folder.is_symlink():
        raise UsageError(
            f"{folder} is a link, and nothing is written outside of a run's directory."
            "\nReplace it with the folder that it points to; the directory itself may "
            "be a link."
        )
