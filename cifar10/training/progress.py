"""The progress of a run: the step reached, and the checkpoints that keep it."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.config import layout
from cifar10.errors import DiskError, UsageError
from cifar10.process import invocation
from cifar10.run_directory import checkpoints, logs, restoring, starting
from cifar10.run_directory.early_stopping import EarlyStopping, why_ended
from cifar10.towers.towers import TowerBuilder
from cifar10.training.assembly import Training


class Progress:
    """The step that a run has reached, saved to and restored from checkpoints.

    With several workers, only the chief writes and reads checkpoints; `broadcast`
    copies the chief's state to the other workers.
    """

    def __init__(self, training: Training) -> None:
        config, self._run = training.config, training.run
        self._writes = training.workers.is_chief
        of_machine = {name: self._run.values[name] for name in starting.OF_MACHINE}
        self._settings = {**training.determining(), **of_machine}
        self.step = 0  # The number of steps done so far.
        self.left_out = 0  # Input batches skipped because of rollbacks.
        self.skipped_steps = 0  # Those whose update was skipped (--on_nan skip).
        self.early_stopping = EarlyStopping(best_by=config.checkpoints.best_by)
        self.metric_averages: dict[str, float] = {}  # Moving averages, by name.
        self.noise_averages: dict[str, float] = {}  # By `noise_scale`.
        # Whether --max_hours have passed, or the run was pruned and cannot continue.
        self.is_time_up = False
        self._began = time.perf_counter()  # As if the run had never been interrupted.
        self._path = training.train_dir
        self._directory = self._path / layout.CHECKPOINTS
        self._state = training.towers.state
        self._config = config
        self._examples_per_epoch = len(training.images)

    @property
    def batch(self) -> int:
        """The number of the next input batch, counted from 0."""
        return self.step + self.left_out

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: by steps, by hours or by early stopping."""
        patience = self._config.checkpoints.stop_after_no_gain
        has_ended = self.is_time_up or self.early_stopping.should_stop(patience)
        return has_ended or self.step >= self._config.run.max_steps

    @property
    def hours(self) -> float:
        """Hours spent on the run, including earlier processes but not lost work."""
        return (time.perf_counter() - self._began) / 3600.0

    @property
    def has_no_time(self) -> bool:
        """Whether `max_hours` have passed. Only the chief checks; others get False."""
        limit = self._config.run.max_hours
        return self._writes and limit is not None and self.hours >= limit

    def restore(self) -> list[str]:
        """Restores the newest intact checkpoint, if there is one.

        Returns messages on damaged checkpoints and on a changed log. Raises a
        `UsageError` if the checkpoint is from another run or model, or all are damaged.
        """
        if not self._writes:
            return []
        self._state.halted.assign(False)
        messages = []
        checkpoints.delete_incomplete(self._directory)  # Those of killed runs.
        newest, refused = self.load()
        if newest is None and refused:
            raise UsageError(restoring.why_none(self._directory, refused=refused))
        for step, error in refused.items():
            aside = checkpoints.set_aside(self._directory, step)
            messages.append(
                f"PASSING OVER the damaged checkpoint of step {step}: {error}. "
                f"It is kept as {aside}."
            )
        self._began = time.perf_counter()
        if newest:
            self.step, manifest = newest.step, newest.manifest
            self._began -= 3600.0 * manifest.get("hours", 0.0)
            self.left_out = manifest.get("left_out", 0)
            self.skipped_steps = manifest.get("skipped_steps", 0)
            self.metric_averages = manifest.get(checkpoints.AVERAGES, {})
            self.noise_averages = manifest.get("gradient_noise", {})
            best_by = self._config.checkpoints.best_by
            self.early_stopping = EarlyStopping.from_manifest(manifest, best_by)
            has_ended = why_ended(self._config, manifest) == "max_hours"
            self.is_time_up = has_ended or (self._path / layout.PRUNED).exists()
            log = checkpoints.make_link(self._directory, self.step, {}).get("log")
            if checkpoints.link_of(manifest).get("log", log) != log:
                lines = f"up to step {self.step}, lines of {layout.METRICS} are missing"
                messages.append(f"Note: {lines} or changed. An audit will report this.")
        return messages

    def load(self, **options: Any) -> restoring.Loaded:
        """Loads variables from a step's checkpoint, or the newest: `restore_newest`."""

        def restore(found: checkpoints.Checkpoint) -> None:
            checkpoints.restore(found, self._state.trackables())

        return restoring.restore_newest(self._directory, restore, self._run, **options)

    def first_line(self) -> str:
        """Returns a message that the run is new, or that it resumes from a step."""
        if self.step:
            epoch, position = self._epoch_and_position()
            where = f"(epoch {epoch}, image {position:,}) in {self._path}"
            return f"Resuming from step {self.step} {where}"
        return f"New run in {self._path}"

    def broadcast(self, towers: TowerBuilder, *, variables: bool = True) -> None:
        """Copies the chief's state to all replicas; every process has to call it."""
        stopping = self.early_stopping
        sent = [self.step, self.left_out, self.skipped_steps, self.is_time_up]
        numbers = towers.broadcast([*sent, stopping.without_gain], variables=variables)
        self.step, self.left_out, self.skipped_steps, is_time_up, count = numbers
        self.is_time_up = bool(is_time_up)
        self.early_stopping = dataclasses.replace(stopping, without_gain=count)

    def save(self) -> Path | None:
        """Writes a checkpoint, and deletes older ones that need not be kept.

        Returns the checkpoint's folder, or None on a worker that never saves.
        """
        if not self._writes:
            return None
        layout.refuse_link(self._directory)  # Put there since the start.
        known = self.early_stopping.scores  # A full disk may have kept it from the log.
        old = self._directory, self._config.checkpoints, self.step, known
        with contextlib.suppress(DiskError):  # Makes room if many have accumulated.
            checkpoints.delete_old(*old)
        for name in (layout.METRICS, layout.STARTS, ""):
            with contextlib.suppress(OSError):  # The link must not outlast its logs.
                files.sync(self._path / name)
        link = checkpoints.make_link(self._directory, self.step, self._settings)
        path = self._write(self._directory, {checkpoints.LINK: link})
        checkpoints.delete_old(*old)
        return path

    def keep(self) -> None:
        """Never deletes the checkpoint of this step, from which replays begin."""
        path = checkpoints.folder(self._directory, self.step) / checkpoints.KEEP
        if self._writes:
            with contextlib.suppress(OSError):
                files.opened(path, "ab").close()

    def save_for_debugging(self, folder: Path, facts: Mapping[str, Any]) -> Path | None:
        """Writes a debug checkpoint, which is never resumed from and never deleted.

        The manifest also gets `facts`. An earlier debug checkpoint of the same step is
        renamed. Returns the folder. Only the chief writes; other workers return None.
        """
        if not self._writes:
            return None
        if self.step in checkpoints.steps(folder):
            checkpoints.set_aside(folder, self.step, "earlier")
        return self._write(folder, facts)

    def log_event(self, step: int, event: str, what: str) -> None:
        """Appends an event to `metrics.jsonl`, for alerts; a full disk loses it."""
        line = {"step": step, "time": time.time(), "event": event, "what": what}
        if self._writes:
            with contextlib.suppress(OSError):
                logs.append_line(self._path / layout.METRICS, line)

    def last_saved(self) -> int | None:
        """Returns the step of the last checkpoint; None if there is none."""
        return max(checkpoints.steps(self._directory), default=None)

    def how_to_resume(self) -> str:
        """Returns a sentence on the last checkpoint and how to resume from it."""
        if not self._writes:
            return "The chief reports which checkpoint is the last."
        if (last := self.last_saved()) is None:
            return "No checkpoint was written yet; the run will start over."
        how = "the same command without --fresh resumes."
        workers = self._config.machine.workers
        if command := invocation.to_train(workers, resume=self._path):
            how = f"resume the run with:\n    {command}"
        return f"The last good checkpoint is from step {last}; {how}"

    def _write(self, directory: Path, further: Mapping[str, Any]) -> Path:
        epoch, position = self._epoch_and_position()
        facts = {
            **self._config.identity,
            "epoch": epoch,
            "position": position,
            "left_out": self.left_out,
            "skipped_steps": self.skipped_steps,
            checkpoints.AVERAGES: self.metric_averages,
            "gradient_noise": self.noise_averages,
            **self.early_stopping.to_manifest(),
            "hours": self.hours,
            **further,
        }
        parts = self._state.trackables()
        return checkpoints.save(directory, parts, step=self.step, facts=facts)

    def _epoch_and_position(self) -> tuple[int, int]:
        """Returns the epoch, from 0, and how many of its images have been used."""
        used = self.batch * self._config.global_batch_size
        return divmod(used, self._examples_per_epoch)
