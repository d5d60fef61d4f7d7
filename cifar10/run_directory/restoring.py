"""Restores a run's newest usable, best or given checkpoint.

Training, evaluation, followers and exports all use this module, so all of them refuse
the same checkpoints: damaged ones, and those from another run, step or model.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cifar10.config import layout
from cifar10.config.fields import result_determining
from cifar10.config.run_config import RecordedRun
from cifar10.config.run_options import BEST
from cifar10.errors import UsageError
from cifar10.models.registry import check_name
from cifar10.run_directory import checkpoints, scores, starting
from cifar10.run_directory.checkpoints import Checkpoint, DamagedError

# Which checkpoint to use: a step, `BEST`, or None for the newest.
Wanted = int | str | None
# The checkpoint that was used, if any, and the errors of newer ones, by step.
Loaded = tuple[Checkpoint | None, dict[int, Exception]]


def check_usable(name: str, trusted: str | None, *wanted: Wanted) -> RecordedRun:
    """Returns a run; does not import TensorFlow, which takes seconds.

    Refuses a missing run, model or `wanted` checkpoint, and an untrusted model.
    """
    run = RecordedRun.read(layout.absolute_path(name))
    run.check_model(trusted)
    check_name(run.config.network.model)
    for one in wanted:
        if not candidates(folder := run.directory / layout.CHECKPOINTS, one):
            raise UsageError(why_none(folder, one))
    return run


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
    return f"--step {wanted}: no such checkpoint. Omit it, or give a kept step: {kept}."


def restore_newest(
    directory: Path,
    load: Callable[[Checkpoint], None],
    run: RecordedRun,
    *,
    wanted: Wanted = None,
    skip: Collection[int] = (),
    tolerate: type[Exception] | tuple[type[Exception], ...] = DamagedError,
) -> Loaded:
    """Loads the newest usable checkpoint; returns it and the errors of newer ones.

    Calls `load` with a checkpoint that is intact and of this `run`.
    If training deletes the checkpoint meanwhile, takes the next one. Ignores the steps
    in `skip`. After an error of a class in `tolerate`, tries the next older checkpoint.

    Raises:
        DamagedError: A checkpoint is damaged, and `tolerate` omits this error.
        UsageError: A checkpoint is from another run or model, or cannot be read.
    """
    refused: dict[int, Exception] = {}
    seen = set(skip)
    # Listed anew each time, because training may delete and write checkpoints.
    while steps := [step for step in candidates(directory, wanted) if step not in seen]:
        seen.add(step := steps[-1])
        try:
            checkpoint = checkpoints.verify(directory, step)
            check_identity(checkpoint, run)
            load(checkpoint)
        except FileNotFoundError:
            continue
        except tolerate as error:
            refused[step] = error
        else:
            return checkpoint, refused
    return None, refused


def check_identity(checkpoint: Checkpoint, run: RecordedRun) -> None:
    """Refuses a checkpoint of a run that differs in settings other than `data`."""
    settings = checkpoints.link_of(checkpoint.manifest).get("settings", {})
    there = RecordedRun.of(run.directory, {**run.entries, **settings}).values
    there |= {name: checkpoint.manifest.get(name) for name in run.config.identity}
    names = {*run.config.identity, *result_determining(run.config)} - {"data"}
    if there[starting.FINGERPRINT] and run.facts.data_fingerprint:  # Both are known.
        names.add(starting.FINGERPRINT)
    for name in sorted(names):
        if there[name] != (here := run.values[name]):
            raise UsageError(
                f"{checkpoint.path} is from another run: its {name} is {there[name]!r}"
                f", but this run's is {here!r}. Move the checkpoint away."
            )
