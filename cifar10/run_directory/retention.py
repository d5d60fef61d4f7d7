"""Deletes the checkpoints that no rule keeps.

The rules keep the newest ones, those with the best scores, and one every so
many hours for good. Only the folders' content decides, so a resumed run decides alike:

- A checkpoint was written when its manifest was modified. The time is not recorded,
  because runs that compute the same have the same files.
- A checkpoint that is kept for good holds an empty file `keep`. So it stays when the
  run resumes without `--keep_every_hours`, and in a copy whose files have other times.
  A user can make the file by hand.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from cifar10.config import fields, layout
from cifar10.errors import DiskError, reason
from cifar10.process import files
from cifar10.run_directory import checkpoints, scores

KEEP = "keep"


def delete_old(run: Path, keep: fields.Checkpoints, step: int) -> None:
    """Deletes the checkpoints of a run that no rule keeps.

    One that is being read stays until the next call. Those after `step`, the run's
    newest one, are not this run's: they are not deleted, and do not count. If the disk
    fails (`DiskError`), no checkpoint that is to be kept is lost.
    """
    directory = run / layout.CHECKPOINTS
    steps = [saved for saved in checkpoints.steps(directory) if saved <= step]
    older = steps[: -keep.keep_checkpoints]
    kept = _for_good(directory, older, keep.keep_every_hours)
    if keep.keep_best:
        evaluation = run / layout.EVALUATION_EVENTS
        kept.update(scores.best(evaluation, steps, keep.keep_best))
    for candidate in older:
        if candidate not in kept:
            checkpoints.delete(directory, candidate)


def _for_good(directory: Path, steps: Sequence[int], hours: float | None) -> set[int]:
    """Returns the steps that are kept for good, and marks those that are due."""
    kept = set()
    last = -math.inf
    for step in steps:
        folder = checkpoints.folder(directory, step)
        try:
            by_hand = (folder / KEEP).exists()
            if by_hand:
                kept.add(step)
            written = (folder / checkpoints.MANIFEST).stat().st_mtime
            if not by_hand:
                # Where a clock was set back, one more is kept rather than none until it
                # catches up.
                if hours is None or 0 <= written - last < hours * 3600:
                    continue
                files.opened(folder / KEEP, "ab").close()
        except FileNotFoundError:  # Damaged, or deleted by the user.
            continue
        except OSError as error:
            raise DiskError(
                f"{folder / KEEP} cannot be written, so older checkpoints are not "
                f"deleted: {reason(error)}.",
                f"Make {directory} writable for this user and try again.",
            ) from error
        kept.add(step)
        last = written
    return kept
