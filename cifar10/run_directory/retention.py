"""Deletes old checkpoints."""

from pathlib import Path

from cifar10.config import fields, layout
from cifar10.run_directory import checkpoints, scores

KEEP = "keep"  # An empty file that the user or a rollback creates in a checkpoint.


def delete_old(run: Path, keep: fields.Checkpoints, step: int) -> None:
    """Deletes old checkpoints of a run, except the best and those with a file `keep`.

    Checkpoints after `step`, the newest step of this run, belong to another run; they
    are neither deleted nor counted. Even after a `DiskError`, all checkpoints to keep
    are intact.
    """
    directory = run / layout.CHECKPOINTS
    steps = [saved for saved in checkpoints.steps(directory) if saved <= step]
    kept: set[int] = set()
    if keep.keep_best:
        kept.update(scores.best(run, steps, keep.keep_best))
    for old in steps[: -keep.keep_checkpoints]:
        if old not in kept and not (checkpoints.folder(directory, old) / KEEP).exists():
            checkpoints.delete(directory, old)
