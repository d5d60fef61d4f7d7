"""Follows a run: loads its newest checkpoint, and later the newer ones that appear."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.errors import UsageError, reason, say
from cifar10.follower.trained_model import TrainedModel
from cifar10.run_directory import checkpoints, restoring
from cifar10.run_directory.checkpoints import Checkpoint, DamagedError
from cifar10.run_directory.early_stopping import why_ended

# Errors after which only the checkpoint is refused, and the run still followed.
_REFUSED = (
    DamagedError,
    UsageError,
    OSError,
    MemoryError,
    tf.errors.ResourceExhaustedError,
)
# A refused checkpoint may become readable, but reading large files is slow.
RETRY_SECONDS = 10.0


class FollowedRun:
    """A run whose newest or `wanted` checkpoint is kept loaded.

    The directory need not exist yet. The run's `config.json` may change, and another
    run may replace this one, for example with --fresh. The keyword arguments `reading`
    are passed to `TrainedModel`.

    Attributes:
        directory: Directory of the run.
        model: The model of the run; None before the first checkpoint.
        step: Step of the checkpoint that was loaded last; None before the first.
        refusals: Why checkpoints or runs were refused, one sentence each.
    """

    def __init__(
        self,
        directory: Path,
        device: str = "/cpu:0",
        *,
        wanted: restoring.Wanted = None,
        **reading: Any,
    ) -> None:
        self.directory = directory
        self.model: TrainedModel | None = None
        self.step: int | None = None
        self.refusals: list[str] = []
        self._said: set[str] = set()
        self._device = device
        self._wanted = wanted
        self._reading = reading
        self._folder = directory / layout.CHECKPOINTS
        self._identity: tuple[int, int] | None = None  # The folder's device and inode.
        self._problem = ""  # Why the last look failed.
        self._manifest: dict[str, Any] = {}  # Of the checkpoint that was loaded last.
        self._refused: dict[int, str] = {}  # Reasons for refusal, by step.
        self._retry_at = 0.0  # When to retry refused ones.

    @property
    def has_finished(self) -> bool:
        """Whether the run ended at the loaded checkpoint.

        The run may still be extended later, or replaced by another run.
        """
        if self.model is None or self.step is None:
            return False
        return why_ended(self.model.settings, self._manifest) is not None

    def look(self) -> bool:
        """Loads the newest checkpoint; returns whether a new one was loaded.

        Raises:
            UsageError: The directory cannot be read, or its model cannot be built.
        """
        self._problem = ""
        try:
            settings = run_config.read_run_config(self.directory)
            self._notice_replacement()
            if self.model is None or self.model.settings != settings:
                self.model = None
                model = TrainedModel(self.directory, self._device, **self._reading)
                self._prepare(model)
                self.model = model
                self._refused.clear()  # A checkpoint may fit the new model.
            return self._load_newest(self.model)
        except FileNotFoundError:  # Not written yet, or being moved.
            return False
        except UsageError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # No config.json yet.
                return False
            self._problem = str(error)
            self._add_refusal(str(error))
            raise

    def follow(self, interval: float, *, once: bool = False) -> Iterator[int]:
        """Yields the step of each newly loaded checkpoint until the run has finished.

        Checks every `interval` seconds. Prints to stderr why a checkpoint is refused or
        what is awaited, each message once. With `once`, yields only the newest
        checkpoint, and raises a `UsageError` if no checkpoint can be used.
        """
        while True:
            if self.look() and self.step is not None:
                self.say_news()
                yield self.step
                if once:
                    return
                continue  # A newer one may exist by now.
            if once:
                raise UsageError(self.why_no_weights())
            if self.has_finished:
                self.say_news(f"Training has finished at step {self.step}.")
                return
            waiting = "Waiting for the next checkpoint."
            if self.step is None:
                waiting = self.why_no_weights()
            self.say_news(f"{waiting}\nChecking every {interval:g} s.")
            time.sleep(interval)

    def say_news(self, *news: str) -> None:
        """Prints refusals and other news to stderr, each only once."""
        for line in (*self.refusals, *news):
            if line not in self._said:
                say(line)
                self._said.add(line)

    def why_no_weights(self) -> str:
        """Returns why no checkpoint is loaded yet, and what to do."""
        if self._problem:
            return self._problem
        if not (self.directory / layout.CONFIG).exists():
            return run_config.why_no_run(self.directory)
        try:
            return restoring.why_none(self._folder, self._wanted, self._refused)
        except UsageError as error:  # config.json has changed since the last look.
            return str(error)

    def _prepare(self, model: TrainedModel) -> None:
        """Override to prepare the model before any checkpoint is loaded into it."""

    def _use(self, model: TrainedModel, checkpoint: Checkpoint) -> None:
        """Override to use a loaded checkpoint; raise an exception to refuse it."""

    def _notice_replacement(self) -> None:
        """Forgets the loaded model if another run has replaced the checkpoints folder.

        A new folder may reuse the inode of a deleted one. In that case, the lower steps
        of the new run reveal the replacement.
        """
        newest = max(checkpoints.steps(self._folder), default=0)
        found = self._folder.stat()
        identity, before = (found.st_dev, found.st_ino), self._identity
        if identity != before or newest < (self.step or 0):
            self._identity = identity
            self.model = self.step = None
            self._refused = {}

    def _load_newest(self, model: TrainedModel) -> bool:
        steps = checkpoints.steps(self._folder)
        loaded = -1 if self.step is None else self.step
        newest_only = self._wanted is None  # A new best may be an older step.
        done = {s for s in steps if s == loaded or (newest_only and s < loaded)}
        is_early = time.monotonic() < self._retry_at
        self._refused = {
            step: self._refused[step]
            for step in steps
            if is_early and step in self._refused
        }

        def load(checkpoint: Checkpoint) -> None:
            model.load(checkpoint)
            self._use(model, checkpoint)

        newest, refused = restoring.restore_newest(
            self._folder,
            load,
            model.settings,
            wanted=self._wanted,
            skip={*self._refused, *done},
            tolerate=_REFUSED,
        )
        for step, error in refused.items():
            self._refused[step] = why = reason(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._add_refusal(f"The checkpoint of step {step} is refused: {why}")
        if newest is None:
            return False
        self.step, self._manifest = newest.step, newest.manifest
        return True

    def _add_refusal(self, refusal: str) -> None:
        if refusal not in self.refusals:
            self.refusals.append(refusal)
