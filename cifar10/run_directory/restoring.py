"""Restores a run's newest usable checkpoint, its best one, or that of a given step.

Training, evaluation, followers and exports all use this module, so all of them refuse
the same checkpoints: damaged ones, and those of another run, step or model.
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout, run_config
from cifar10.config.run_options import BEST
from cifar10.errors import UsageError, say
from cifar10.models.registry import check_name
from cifar10.process import invocation
from cifar10.run_directory import checkpoints, scores
from cifar10.run_directory.checkpoints import Checkpoint, DamagedError

# Which checkpoint to use: a step, `BEST`, or None for the newest.
Wanted = int | str | None

# Entries that a checkpoint's manifest shares with its run's `config.json`.
_RUN_IDENTITY = ("seed", "global_batch_size")


def check_usable(name: str, wanted: Wanted, trust_model: str | None) -> None:
    """Raises a `UsageError` if a command cannot use the run in a directory.

    The run or its model may be missing, the model may be untrusted, or the wanted
    checkpoint may be missing.
    """
    run = layout.locate_run(name)
    settings = run_config.read_run_config(run)
    run_config.check_model(settings, trust_model)
    check_name(settings["model"])
    directory = run / layout.CHECKPOINTS
    if wanted is not None and not candidates(directory, wanted):
        raise UsageError(why_none(directory, wanted))


def candidates(directory: Path, wanted: Wanted) -> list[int]:
    """Returns the steps of the checkpoints that match `wanted`, ascending.

    `BEST` matches the checkpoint with the best score among those that still exist.
    """
    steps = checkpoints.steps(directory)
    if wanted == BEST:
        return scores.best(directory.parent, steps)
    return [step for step in steps if wanted is None or str(step) == str(wanted)]


def why_none(
    directory: Path, wanted: Wanted = None, refused: Mapping[int, object] | None = None
) -> str:
    """Returns why no checkpoint can be used, and what to do.

    `refused` maps the steps of refused checkpoints to the reasons.
    """
    steps = checkpoints.steps(directory)
    others = "Without --step, the newest intact checkpoint is used. Available: "
    others += f"{', '.join(map(str, steps))}."
    reasons = "; ".join(f"step {step}: {why}" for step, why in (refused or {}).items())
    if reasons and wanted is not None:
        return f"--step {wanted}: the checkpoint cannot be used: {reasons}. {others}"
    if reasons:
        return (
            f"No checkpoint in {directory} can be used: {reasons}. Restore one "
            "from a backup, or start over with another --train_dir."
        )
    if wanted is None or not steps:
        run = run_config.read_run_config(directory.parent)
        period = run.get("checkpoint_steps")
        when = f" at step {period:,} or its end (--checkpoint_steps)" if period else ""
        return (
            f"There is no checkpoint in {directory.parent} yet.\nTraining writes the "
            f"first one{when}."
        )
    if wanted != BEST:
        return f"--step {wanted}: the checkpoint does not exist. {others}"
    return (
        f"--step {BEST}: no checkpoint has a score. {others} Score one with:\n"
        f"    {invocation.command('eval')} --step {steps[-1]} --train_dir "
        f"{shlex.quote(str(directory.parent))} "
        f"--eval_data {scores.deciding_part(directory.parent)}"
    )


def _say_if_not_best(directory: Path, step: int, wanted: Wanted) -> None:
    """Prints a note if the best checkpoint is wanted, but another had to be used."""
    found = scores.deciding(run := directory.parent)
    best = next(iter(scores.ranked(found, scores.deciding_score(run))), step)
    if wanted == BEST and best != step and step in found:
        say(
            f"--step {BEST}: step {best} scored {found[best]:.3f}, but its checkpoint "
            f"was not kept (--keep_best).\nUsing step {step}, which scored "
            f"{found[step]:.3f}."
        )


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
    Training does not delete the checkpoint while `load` reads it. Ignores the steps in
    `skip`. After an error of a class in `tolerate`, tries the next older checkpoint.

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
            with checkpoints.reading(directory, step):
                checkpoint = checkpoints.verify(directory, step)
                _check_identity(checkpoint, settings)
                load(checkpoint)
        except FileNotFoundError:
            continue
        except tolerate as error:
            refused[step] = error
        else:
            _say_if_not_best(directory, step, wanted)
            return checkpoint, refused
    return None, refused


def _check_identity(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Raises a `UsageError` if a checkpoint belongs to another run."""
    for name in _RUN_IDENTITY:
        recorded, expected = checkpoint.manifest.get(name), settings.get(name)
        if recorded != expected:
            raise UsageError(
                f"{checkpoint.path} is of another run: its {name} is {recorded!r}, but "
                f"this run's is {expected!r}. Move the checkpoint away."
            )
