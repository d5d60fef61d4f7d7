"""Deletes the checkpoints that no rule keeps.

The rules keep the newest ones, those with the best scores, and those whose folder holds
an empty file `keep`, which a user makes by hand.
"""

from pathlib import Path

from cifar10.config import fields, layout
from cifar10.run_directory import checkpoints, scores

KEEP = "keep"


def delete_old(run: Path, keep: fields.Checkpoints, step: int) -> None:
    """Deletes the checkpoints of a run that no rule keeps.

    One that is being read stays until the next call. Those of steps after `step`, the
    run's newest, belong to another run: they are not deleted, and do not count. If the
    disk fails (`DiskError`), no checkpoint that is to be kept is lost.
    """
    directory = run / layout.CHECKPOINTS
    steps = [saved for saved in checkpoints.steps(directory) if saved <= step]
    kept: set[int] = set()
    if keep.keep_best:
        kept.update(scores.best(run, steps, keep.keep_best))
    for old in steps[: -keep.keep_checkpoints]:
        if old not in kept and not (checkpoints.folder(directory, old) / KEEP).exists():
            checkpoints.delete(directory, old)
