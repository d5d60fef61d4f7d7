"""Follows a run: loads its newest checkpoint, and each newer one as it is written."""

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

# Errors for which a checkpoint is refused, and the run followed further.
_REFUSED = (
    DamagedError,
    UsageError,
    OSError,
    MemoryError,
    tf.errors.ResourceExhaustedError,
)
# A disk error may pass, and a copy may be completed; but large files are slow to read.
RETRY_SECONDS = 10.0


class FollowedRun:
    """The run in a directory, whose newest or `wanted` checkpoint is kept loaded.

    The directory need not exist yet. A later session may continue the run with another
    `config.json`, and another run may replace it, as with --fresh. Further arguments
    are those of `TrainedModel`.

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
        self._identity: tuple[int, int] | None = None  # Of that folder, on its disk.
        self._problem = ""  # Of the last look, with the run as a whole.
        self._manifest: dict[str, Any] = {}  # Of the checkpoint that was loaded last.
        self._refused: dict[int, str] = {}  # Reasons by step.
        self._retry_at = 0.0  # By `time.monotonic`: refused ones may be read again.

    @property
    def has_finished(self) -> bool:
        """Whether the loaded checkpoint is the last one of the training.

        The training may be extended, and another run may replace this one.
        """
        if self.model is None or self.step is None:
            return False
        return why_ended(self.model.settings, self._manifest) is not None

    def look(self) -> bool:
        """Loads the newest checkpoint, and returns whether it is new and can be used.

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
        except FileNotFoundError:  # Not written yet, or just being moved aside.
            return False
        except UsageError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # No config.json yet.
                return False
            self._problem = str(error)
            self._add_refusal(str(error))
            raise

    def follow(self, interval: float, *, once: bool = False) -> Iterator[int]:
        """Yields the step of each checkpoint when it is loaded, until the last one.

        Refusals and what it waits for are printed to stderr, once each. Two looks are
        `interval` seconds apart. With `once` the newest checkpoint is also the last;
        there has to be one that can be used.
        """
        while True:
            if self.look() and self.step is not None:
                self.say_news()
                yield self.step
                if once:
                    return
                continue  # There may be news by now, such as a later end.
            if once:
                raise UsageError(self.why_no_weights())
            if self.has_finished:
                self.say_news(f"The training has finished at step {self.step}.")
                return
            waiting = "Waiting for the next checkpoint."
            if self.step is None:
                waiting = self.why_no_weights()
            self.say_news(f"{waiting}\nLooking every {interval:g} s.")
            time.sleep(interval)

    def say_news(self, *news: str) -> None:
        """Prints what was refused, and other news, to stderr, once each."""
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
        """Called with the model of the run before any checkpoint is loaded into it."""

    def _use(self, model: TrainedModel, checkpoint: Checkpoint) -> None:
        """Uses a loaded checkpoint; the checkpoint is refused if this raises."""

    def _notice_replacement(self) -> None:
        """Forgets the run if the folder of checkpoints is another one by now.

        A new folder may get the inode of a deleted one; then the lower steps of the new
        run give it away.
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
        newest_only = self._wanted is None  # The best may be older than the last best.
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
