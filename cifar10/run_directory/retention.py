"""Deletes old checkpoints.

The newest checkpoints are kept, those with the best scores, and those in whose folder
the user has created an empty file `keep`.
"""

from pathlib import Path

from cifar10.config import fields, layout
from cifar10.run_directory import checkpoints, scores

KEEP = "keep"


def delete_old(run: Path, keep: fields.Checkpoints, step: int) -> None:
    """Deletes all but the newest, the best and the user's kept checkpoints of a run.

    A checkpoint that is being read stays until the next call. Checkpoints after `step`,
    the run's newest, belong to another run and are neither deleted nor counted. A
    `DiskError` never costs a checkpoint that should be kept.
    """
    directory = run / layout.CHECKPOINTS
    steps = [saved for saved in checkpoints.steps(directory) if saved <= step]
    kept: set[int] = set()
    if keep.keep_best:
        kept.update(scores.best(run, steps, keep.keep_best))
    for old in steps[: -keep.keep_checkpoints]:
        if old not in kept and not (checkpoints.folder(directory, old) / KEEP).exists():
            checkpoints.delete(directory, old)
