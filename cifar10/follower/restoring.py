"""Fills a trained model from the checkpoint that a command is about."""

from __future__ import annotations

import sys
from pathlib import Path

from cifar10.errors import UsageError
from cifar10.follower.trained_model import TrainedModel
from cifar10.run_directory import checkpoints, layout, readers


def load(
    trained: TrainedModel, directory: Path, step: int | None = None
) -> checkpoints.Checkpoint:
    """Reads the values of a checkpoint into the model of its run.

    Damaged checkpoints that are passed over are named on stderr.

    Args:
        trained: The model of the run.
        directory: The run's directory.
        step: Step of the checkpoint; None for the newest intact one.

    Returns:
        The checkpoint.

    Raises:
        UsageError: There is no such checkpoint, or it is damaged or of another model.
    """
    folder = directory / layout.CHECKPOINTS
    while True:
        checkpoint = _newest(folder) if step is None else _that_of(folder, step)
        try:
            # The training does not delete it meanwhile.
            with readers.reading(checkpoint.path / checkpoints.MANIFEST):
                trained.load(checkpoint)
        except FileNotFoundError:  # It did, between the choice and the lock.
            continue
        return checkpoint


def _newest(folder: Path) -> checkpoints.Checkpoint:
    newest, damaged = checkpoints.newest_intact(folder)
    for step, why in damaged.items():
        passing = f"PASSING OVER the damaged checkpoint of step {step}: {why}."
        print(passing, file=sys.stderr, flush=True)
    if newest is None:
        raise UsageError(
            f"There is no checkpoint in {folder}; the training writes the first after "
            "--checkpoint_steps steps, and one at its end."
        )
    return newest


def _that_of(folder: Path, step: int) -> checkpoints.Checkpoint:
    others = ", ".join(map(str, checkpoints.steps(folder))) or "none"
    try:
        return checkpoints.verify(folder, step)
    except FileNotFoundError as error:
        raise UsageError(
            f"--step {step}: there is no checkpoint of this step in {folder}. "
            f"There are: {others}."
        ) from error
    except checkpoints.DamagedError as error:
        raise UsageError(
            f"--step {step}: the checkpoint is damaged: {error}. Without --step the "
            f"newest intact one is taken. There are: {others}."
        ) from error
