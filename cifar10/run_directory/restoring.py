"""Restores a run's newest usable checkpoint, its best one, or that of a given step.

Training, evaluation, followers and exports all use this module, so all of them refuse
the same checkpoints: damaged ones, and those of another run, step or model.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout, run_config
from cifar10.config.run_options import BEST
from cifar10.errors import UsageError
from cifar10.models.registry import check_name
from cifar10.run_directory import checkpoints, scores
from cifar10.run_directory.checkpoints import Checkpoint, DamagedError

# Which checkpoint to use: a step, `BEST`, or None for the newest.
Wanted = int | str | None

# Entries that a checkpoint's manifest shares with its run's `config.json`.
_RUN_IDENTITY = ("seed", "global_batch_size")


def check_usable(name: str, trusted: str | None, *wanted: Wanted) -> dict[str, Any]:
    """Returns a run's `config.json`; does not import TensorFlow, which takes seconds.

    Refuses a missing run, model or `wanted` checkpoint, and an untrusted model.
    """
    run = layout.absolute_path(name)
    settings = run_config.read_run_config(run)
    run_config.check_model(settings, trusted)
    check_name(settings["model"])
    for one in wanted:
        if not candidates(folder := run / layout.CHECKPOINTS, one):
            raise UsageError(why_none(folder, one))
    return settings


def candidates(directory: Path, wanted: Wanted) -> list[int]:
    """Returns the steps that match `wanted`, ascending; `BEST` ranks existing ones."""
    steps = checkpoints.steps(directory)
    if wanted == BEST:
        return scores.best(directory.parent, steps)
    return [step for step in steps if wanted is None or str(step) == str(wanted)]


def why_none(
    directory: Path, wanted: Wanted = None, refused: Mapping[int, object] | None = None
) -> str:
    """Returns why no checkpoint can be used; `refused` maps steps to the reasons."""
    steps = checkpoints.steps(directory)
    if refused:
        reasons = "; ".join(f"step {step}: {why}" for step, why in refused.items())
        where = directory if wanted is None else f"--step {wanted}"
        return (
            f"{where}: no checkpoint can be used: {reasons.rstrip('.')}. Restore one "
            "from a backup, or start over with another --train_dir."
        )
    if wanted is None or not steps:
        return f"There is no checkpoint in {directory.parent} yet."
    if wanted == BEST:
        return f"--step {BEST}: no checkpoint has a score. Score one with eval first."
    kept = ", ".join(map(str, steps))
    return f"--step {wanted}: no such checkpoint. Omit it, or give one of {kept}."


def restore_newest(
    directory: Path,
    load: Callable[[Checkpoint], None],
    settings: Mapping[str, Any],
    *,
    wanted: Wanted = None,
    skip: Collection[int] = (),
    tolerate: type[Exception] | tuple[type[Exception], ...] = DamagedError,
) -> tuple[Checkpoint | None, dict[int, Exception]]:
    """Loads the newest usable checkpoint; returns it and the errors of newer ones.

    Calls `load` with a checkpoint that is intact and of the run with these `settings`.
    If training deletes the checkpoint meanwhile, takes the next one. Ignores the steps
    in `skip`. After an error of a class in `tolerate`, tries the next older checkpoint.

    Raises:
        DamagedError: A checkpoint is damaged, and `tolerate` omits this error.
        UsageError: A checkpoint is of another run or model, or cannot be read.
    """
    refused: dict[int, Exception] = {}
    seen = set(skip)
    # Listed anew each time, because training may delete and write checkpoints.
    while steps := [step for step in candidates(directory, wanted) if step not in seen]:
        seen.add(step := steps[-1])
        try:
            checkpoint = checkpoints.verify(directory, step)
            check_identity(checkpoint, settings)
            load(checkpoint)
        except FileNotFoundError:
            continue
        except tolerate as error:
            refused[step] = error
        else:
            return checkpoint, refused
    return None, refused


def check_identity(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Raises a `UsageError` if a checkpoint belongs to another run."""
    for name in _RUN_IDENTITY:
        recorded, expected = checkpoint.manifest.get(name), settings.get(name)
        if recorded != expected:
            raise UsageError(
                f"{checkpoint.path} is of another run: its {name} is {recorded!r}, but "
                f"this run's is {expected!r}. Move the checkpoint away."
            )
