"""How far a run has come: its checkpoints, and going on from the newest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from cifar10 import checkpoints, retention
from cifar10.errors import DiskError, UsageError
from cifar10.train_state import TrainState


class Progress:
    """The step of a run, kept in its checkpoints.

    Args:
        checkpoint_dir: Folder of the checkpoints.
        state: What they hold.
        seed: Seed of the run.
        global_batch_size: Images per step.
        examples_per_epoch: Images in the training set.
        keep: Which checkpoints to keep.
        go_on: Whether a disk that fails is said on stderr and no error.

    Attributes:
        step: Synchronous updates applied so far.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        state: TrainState,
        *,
        seed: int,
        global_batch_size: int,
        examples_per_epoch: int,
        keep: retention.Rules,
        go_on: bool,
    ) -> None:
        self.step = 0
        self._directory = checkpoint_dir
        self._state = state
        self._own = {"seed": seed, "global_batch_size": global_batch_size}
        self._examples_per_epoch = examples_per_epoch
        self._keep = keep
        self._go_on = go_on

    def restore(self) -> tuple[list[str], dict[str, float]]:
        """Goes on from the newest intact checkpoint.

        Returns:
            What to tell the user, and the losses' moving averages.

        Raises:
            UsageError: The newest checkpoint is of another run or model.
        """
        told = []
        if left := checkpoints.delete_incomplete(self._directory):
            told.append(
                f"Deleted {len(left)} half-written checkpoint(s) of killed runs."
            )
        newest, damaged = checkpoints.newest_intact(self._directory)
        for step, reason in damaged.items():
            aside = checkpoints.set_aside(self._directory, step)
            told.append(
                f"PASSING OVER the damaged checkpoint of step {step}: {reason}. "
                f"It is kept as {aside}."
            )
        if newest is None:
            return [*told, "New run"], {}
        if any(newest.manifest.get(name) != own for name, own in self._own.items()):
            raise UsageError(
                f"{newest.path} is of another run: its seed and global batch size are "
                "not this one's. Move it away to go on."
            )
        checkpoints.restore(newest, self._state.trackables())
        if int(self._state.global_step) != newest.step:
            raise UsageError(
                f"{newest.path} holds global_step {int(self._state.global_step)}, not "
                f"{newest.step} as its name says. Move it away to go on from another."
            )
        self.step = newest.step
        epoch, position = self._epoch_and_position()
        told.append(
            f"Resuming from step {self.step} (epoch {epoch}, image {position:,})"
        )
        return told, newest.manifest["loss_averages"]

    def save(self, loss_averages: Mapping[str, float], *, last: bool) -> None:
        """Writes a checkpoint and deletes those that are not to be kept.

        Args:
            loss_averages: The losses' moving averages.
            last: Whether none follows. A run that cannot keep its end has not done
                what it was asked for, so it does not go on without.

        Raises:
            DiskError: The disk fails, and the run does not go on without.
        """
        epoch, position = self._epoch_and_position()
        try:
            checkpoints.save(
                self._directory,
                self._state.trackables(),
                step=self.step,
                facts={
                    **self._own,
                    "epoch": epoch,
                    "position": position,
                    "loss_averages": dict(loss_averages),
                },
            )
            retention.apply(self._directory, self._keep, self.step)
        except DiskError as error:
            if last or not self._go_on:
                raise
            going_on = "The training goes on and tries again at the next checkpoint."
            print(f"{error.what} {going_on}", file=sys.stderr, flush=True)

    def how_to_go_on(self) -> str:
        """Says which checkpoint is the last and what goes on from it."""
        if kept := checkpoints.steps(self._directory):
            on = "the same command, without --fresh, goes on from there"
            return f"The last good checkpoint is of step {kept[-1]}; {on}."
        return "No checkpoint was written yet."

    def _epoch_and_position(self) -> tuple[int, int]:
        """Returns the epoch, from 0, and how many of its images have been seen."""
        seen = self.step * self._own["global_batch_size"]
        return divmod(seen, self._examples_per_epoch)
