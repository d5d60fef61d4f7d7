"""Restores a run's newest usable checkpoint, that of a given step, or the best.

Training, evaluation, followers and exports all restore here, so they refuse the same
checkpoints: damaged ones, those of another run, and those of another step or model.
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

# Which checkpoint to use: that of a step, `BEST`, or the newest.
Wanted = int | str | None

# Entries of both a checkpoint's manifest and its run's configuration.
_RUN_IDENTITY = ("seed", "global_batch_size")


def check_usable(name: str, wanted: Wanted, trust_model: str | None) -> None:
    """Refuses a directory whose run a command cannot use.

    Reasons: there is no run, its model is not trusted or not found, or the wanted
    checkpoint is missing.
    """
    run = layout.locate_run(name)
    settings = run_config.read_run_config(run)
    run_config.check_model(settings, trust_model)
    check_name(settings["model"])
    directory = run / layout.CHECKPOINTS
    if wanted is not None and not candidates(directory, wanted):
        raise UsageError(why_none(directory, wanted))


def candidates(directory: Path, wanted: Wanted) -> list[int]:
    """Returns the steps of the checkpoints that may be used, ascending.

    The best is the one with the best score among the checkpoints that are there.
    """
    steps = checkpoints.steps(directory)
    if wanted == BEST:
        return scores.best(directory.parent, steps)
    return [step for step in steps if wanted is None or str(step) == str(wanted)]


def why_none(
    directory: Path, wanted: Wanted = None, refused: Mapping[int, object] | None = None
) -> str:
    """Returns why no checkpoint can be used, and what to do.

    `refused` are the reasons why checkpoints cannot be used, by their steps.
    """
    steps = checkpoints.steps(directory)
    others = "Without --step the newest intact one is used. There are: "
    others += f"{', '.join(map(str, steps))}."
    reasons = "; ".join(f"step {step}: {why}" for step, why in (refused or {}).items())
    if reasons and wanted is not None:
        return f"--step {wanted}: the checkpoint cannot be used: {reasons}. {others}"
    if reasons:
        return (
            f"No checkpoint in {directory} can be used: {reasons}. Bring one back from "
            "a copy, or start over with another --train_dir."
        )
    if wanted is None or not steps:
        run = run_config.read_run_config(directory.parent)
        period = run.get("checkpoint_steps")
        when = f" at step {period:,} or its end (--checkpoint_steps)" if period else ""
        return (
            f"There is no checkpoint in {directory.parent} yet;\nthe training writes "
            f"the first{when}."
        )
    if wanted != BEST:
        return f"--step {wanted}: the checkpoint does not exist. {others}"
    return (
        f"--step {BEST}: no checkpoint has a score. {others} Score one:\n"
        f"    {invocation.command('eval')} --step {steps[-1]} --train_dir "
        f"{shlex.quote(str(directory.parent))} "
        f"--eval_data {scores.deciding_part(directory.parent)}"
    )


def _say_if_not_best(directory: Path, step: int, wanted: Wanted) -> None:
    """Reports a step that scored better than the best one with a checkpoint."""
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
    """Returns the newest checkpoint that can be used, and why newer ones were refused.

    Args:
        directory: Folder of the run's checkpoints.
        load: Reads the values of a checkpoint that is intact and of this run; while it
            is called, the checkpoint is not deleted.
        settings: The run's settings; a checkpoint of another run is refused.
        wanted: Which checkpoint to use.
        skip: Steps whose checkpoints are not looked at.
        tolerate: Errors for which a checkpoint is refused, and an older one is tried;
            others are raised.

    Raises:
        DamagedError: A checkpoint is not what was written.
        UsageError: It is of another run or model, or cannot be read.
    """
    refused: dict[int, Exception] = {}
    seen = set(skip)
    # Listed anew each time: where one was deleted, the training has written another.
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
    """Refuses the checkpoint of another run."""
    for name in _RUN_IDENTITY:
        recorded, expected = checkpoint.manifest.get(name), settings.get(name)
        if recorded != expected:
            raise UsageError(
                f"{checkpoint.path} is of another run: its {name} is {recorded!r}, and "
                f"this run's is {expected!r}. Move it away."
            )
