"""Names the files of a run, and resolves the paths that flags name."""

import os
from pathlib import Path

from cifar10.errors import UsageError

# This file makes a directory the directory of a run. The others are beside it.
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
DEBUG_CHECKPOINTS = "debug"
TRAIN_EVENTS = "train"
EVALUATION_EVENTS = "eval"
METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"  # One line for each process that trained the run.
PRUNED = "pruned"  # Marks a finished run that keeps only its best checkpoint.
CORRECTIONS = "corrections.csv"  # Written by `data`, with a page of the pictures.
DESCRIPTION = "cifar10.json"  # In an export, of its classes and its input.

# Folders that a training run writes to.
FOLDERS = (CHECKPOINTS, TRAIN_EVENTS, DEBUG_CHECKPOINTS)


def evaluation_events(split: str) -> str:
    """Returns the folder for a split's scores: `eval` for test, else `eval_SPLIT`."""
    return EVALUATION_EVENTS + ("" if split == "test" else f"_{split}")


def absolute_path(name: str) -> Path:
    """Returns the absolute path that a flag names; `~` and `~user` are home folders."""
    expanded = os.path.expanduser(name)  # noqa: PTH111 - pathlib raises other errors.
    # Links are not resolved, so that --fresh moves a link aside, not its target.
    try:
        return Path(os.path.abspath(expanded))  # noqa: PTH100
    except FileNotFoundError as error:
        raise UsageError("The current folder is gone. Change to another.") from error


def refuse_own_folder(path: Path, flag: str) -> None:
    """Refuses to write into a run's directory itself, or a folder of the run's files.

    Links are resolved. Other folders within a run, which its user made, are allowed.
    """
    real = Path(os.path.realpath(path))
    for run in (real, *real.parents):
        first = real.relative_to(run).parts[:1] or (EVALUATION_EVENTS,)
        is_own = first[0] in FOLDERS or first[0].split("_")[0] == EVALUATION_EVENTS
        if is_own and (run / CONFIG).is_file() and (run / CHECKPOINTS).is_dir():
            why = f"{flag} {path} is among the files of the run {run}"
            raise UsageError(f"{why}. Name another place.")


def refuse_link(folder: Path) -> None:
    """Refuses to write to a folder of a run if the folder is a link."""
    if folder.is_symlink():
        why = f"{folder} is a link, but a run writes only inside its directory"
        fix = "Replace it with the folder, or make the run's whole directory a link"
        raise UsageError(f"{why}. {fix}.")
