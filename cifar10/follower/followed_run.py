"""Follows a run: loads its newest checkpoint, and later the newer ones that appear."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, reason, say
from cifar10.run_directory import checkpoints, restoring
from cifar10.run_directory.early_stopping import why_ended
from cifar10.trained_model import TrainedModel


class FollowedRun:
    """Follows a run and keeps its newest or `wanted` checkpoint loaded.

    The directory need not exist yet. The run's `config.json` may change, and another
    run may replace this one, as by --fresh. `reading` are arguments of `TrainedModel`.

    Attributes:
        directory: Directory of the run.
        model: The model of the run; None before the first checkpoint.
        step: Step of the checkpoint that was loaded last; None before the first.
        why_no_weights: Why no checkpoint is loaded yet, and what to do.
        refusals: Why checkpoints or runs were refused, one sentence each.
    """

    def __init__(
        self, directory: Path, device: str, wanted: restoring.Wanted, **reading: Any
    ) -> None:
        self.directory = directory
        self.model: TrainedModel | None = None
        self.step: int | None = None
        self.why_no_weights = f"Nothing has been read from {directory} yet."
        self.refusals: list[str] = []
        self._said: set[str] = set()
        self._device, self._wanted, self._reading = device, wanted, reading
        self._folder = directory / layout.CHECKPOINTS
        self._manifest: dict[str, Any] = {}  # The last loaded checkpoint's.
        self._loaded: tuple[str, float] = "", 1.0  # Its digest and temperature.

    @property
    def has_finished(self) -> bool:
        """Whether the run ended at the loaded checkpoint; it may still be extended."""
        if self.model is None or self.step is None:
            return False
        is_pruned = (self.directory / layout.PRUNED).exists()
        return is_pruned or bool(why_ended(self.model.run.config, self._manifest))

    def look(self) -> bool:
        """Loads the newest checkpoint; returns whether a new one was loaded.

        Raises:
            UsageError: The directory cannot be read, or its model cannot be built.
        """
        try:
            run = RecordedRun.read(self.directory)
            is_replaced = self.step is not None and self._is_replaced(self.step)
            if is_replaced or self.model is None or self.model.run != run:
                self.model = self.step = None  # An extended run loads the same again.
                model = TrainedModel(self.directory, self._device, **self._reading)
                self._prepare(model)
                self.model = model
            return self._load_newest(self.model)
        except FileNotFoundError:  # The run is being moved.
            return False
        except UsageError as error:
            self.why_no_weights = str(error)
            if isinstance(error.__cause__, FileNotFoundError):  # No config.json yet.
                return False
            self._add_refusal(str(error))
            raise

    def follow(self, interval: float, *, once: bool) -> Iterator[int]:
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
                raise UsageError(self.why_no_weights)
            if self.has_finished:
                self.say_news(f"Training has finished at step {self.step}.")
                return
            waiting = "Waiting for the next checkpoint."
            waiting = self.why_no_weights if self.step is None else waiting
            self.say_news(f"{waiting}\nChecking every {interval:g} s.")
            time.sleep(interval)

    def say_news(self, *news: str) -> None:
        """Prints refusals and other news to stderr, each only once."""
        for line in (*self.refusals, *news):
            if line not in self._said:
                say(line)
                self._said.add(line)

    def _prepare(self, model: TrainedModel) -> None:
        """Override to prepare the model before any checkpoint is loaded into it."""

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        """Override to use a loaded checkpoint; raise an exception to refuse it."""

    def _is_replaced(self, step: int) -> bool:
        """Returns whether another run has taken the place of the loaded one."""
        with contextlib.suppress(FileNotFoundError, UsageError):  # Deleted or damaged.
            found = checkpoints.read_manifest(self._folder, step)
            return checkpoints.digest_of(found) != self._loaded[0]
        return step > max(checkpoints.steps(self._folder), default=0)

    def _load_newest(self, model: TrainedModel) -> bool:
        folder, wanted = self._folder, self._wanted
        steps = checkpoints.steps(folder)
        loaded = -1 if self.step is None else self.step
        newest_only = wanted is None  # A new best may be an older step.
        done = {step for step in steps if newest_only and step < loaded} | {loaded}
        try:
            if model.is_recalibrated():
                done.remove(loaded)
        except UsageError as error:  # The temperature in use is kept.
            self._add_refusal(str(error))

        def load(checkpoint: checkpoints.Checkpoint) -> None:
            model.load(checkpoint)
            self._use(model, checkpoint)

        tolerated = UsageError, OSError  # The run is still followed.
        newest, refused = restoring.restore_newest(
            folder, load, model.run, wanted=wanted, skip=done, tolerate=tolerated
        )
        whys = {step: reason(error) for step, error in refused.items()}
        for step, why in whys.items():
            self._add_refusal(f"The checkpoint of step {step} is refused: {why}")
        if newest is None:
            if self.step is None:
                self.why_no_weights = restoring.why_none(folder, wanted, whys)
            return False
        self.step, self._manifest, before = newest.step, newest.manifest, self._loaded
        self._loaded = checkpoints.digest_of(newest.manifest), model.temperature
        return self._loaded != before

    def _add_refusal(self, refusal: str) -> None:
        if refusal not in self.refusals:
            self.refusals.append(refusal)
