"""Restores a run's newest usable checkpoint, or the one of a step.

Training, evaluation, followers and exports all restore here, so they refuse the same
checkpoints: damaged ones, those of another run, and those of another step or model.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, readers
from cifar10.run_directory.checkpoints import Checkpoint, DamagedError

# Entries of both a checkpoint's manifest and its run's configuration.
_RUN_IDENTITY = ("seed", "global_batch_size")


def restore_newest(
    directory: Path,
    load: Callable[[Checkpoint], None],
    settings: Mapping[str, Any],
    *,
    skip: Collection[int] = (),
    tolerate: type[Exception] | tuple[type[Exception], ...] = DamagedError,
) -> tuple[Checkpoint | None, dict[int, Exception]]:
    """Returns the newest checkpoint that can be used, and why newer ones were refused.

    Checkpoints of the steps in `skip` are not looked at. Those that raise an error that
    `tolerate` names are skipped; other errors of `restore_step` are raised.
    """
    refused: dict[int, Exception] = {}
    seen = set(skip)
    # Listed anew each time: where one was deleted, the training has written another.
    while steps := [step for step in checkpoints.steps(directory) if step not in seen]:
        seen.add(steps[-1])
        try:
            return restore_step(directory, steps[-1], load, settings), refused
        except FileNotFoundError:
            continue
        except tolerate as error:
            refused[steps[-1]] = error
    return None, refused


def restore_step(
    directory: Path,
    step: int,
    load: Callable[[Checkpoint], None],
    settings: Mapping[str, Any],
) -> Checkpoint:
    """Restores the checkpoint of a step, which is not deleted meanwhile.

    `load` reads its values if it is intact and agrees with the run's `settings`.

    Raises:
        DamagedError: It is not what was written.
        FileNotFoundError: There is no such checkpoint (any more).
        UsageError: It is of another run or model, or cannot be read.
    """
    path = checkpoints.folder(directory, step)
    with readers.reading(path / checkpoints.MANIFEST):
        checkpoint = checkpoints.verify(directory, step)
        for name in _RUN_IDENTITY:
            recorded, expected = checkpoint.manifest.get(name), settings.get(name)
            if recorded != expected:
                raise UsageError(
                    f"{path} is of another run: its {name} is {recorded!r}, and this "
                    f"run's is {expected!r}. Move it away."
                )
        load(checkpoint)
    return checkpoint


def none_usable(directory: Path, refused: Mapping[int, object]) -> UsageError:
    """Returns the error to raise if every checkpoint of a run was refused."""
    reasons = [f"step {step}: {why}" for step, why in refused.items()]
    return UsageError(
        f"No checkpoint in {directory} can be used: {'; '.join(reasons)}. Bring one "
        "back from a copy, or start over with another --train_dir."
    )
