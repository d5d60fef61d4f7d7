"""Follows a run: loads its newest checkpoint, and each newer one as it is written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import tensorflow as tf

from cifar10.errors import UsageError, reason
from cifar10.run_directory import checkpoints, files, layout, restoring
from cifar10.run_directory.checkpoints import Checkpoint, DamagedError

# Errors for which a checkpoint is refused, and the run followed further.
_REFUSED = (
    DamagedError,
    UsageError,
    OSError,
    MemoryError,
    tf.errors.ResourceExhaustedError,
)

# Errors that lie in the files, however often they are read.
_WRONG_FILES = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_WRONG_CONTENT = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
)

# Name, size and time of change of each file of a checkpoint.
_FileStates = frozenset[tuple[str, int, int]]


class Model(Protocol):
    """A model that checkpoints of a run are loaded into, such as `TrainedModel`."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The content of the run's `config.json`."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Reads the values of an intact checkpoint of the run."""


ModelT = TypeVar("ModelT", bound=Model)


class _Refusal(NamedTuple):
    """Why a checkpoint was refused.

    Attributes:
        reason: The reason, as a sentence.
        file_states: Its files when it was refused; it is read again once they differ.
            None if it is read again anyway, after an error that may pass.
    """

    reason: str
    file_states: _FileStates | None


class FollowedRun(Generic[ModelT]):
    """The run in a directory, whose newest checkpoint is kept loaded.

    A later session may continue the run with another `config.json`, and another run may
    replace it, as with --fresh.

    Args:
        directory: Directory of the run; it need not exist yet.
        build: Builds the model that the run's `config.json` describes; called again
            when that has changed.

    Attributes:
        directory: Directory of the run.
        model: The result of `build`; None before the first checkpoint.
        step: Step of the checkpoint that was loaded last; None before the first.
        refusals: Why checkpoints and descriptions of a run were refused.
    """

    def __init__(self, directory: Path, build: Callable[[], ModelT]) -> None:
        self.directory = directory
        self.model: ModelT | None = None
        self.step: int | None = None
        self.refusals: list[str] = []
        self._build = build
        self._folder = directory / layout.CHECKPOINTS
        self._opened: int | None = None
        self._description: bytes | None = None
        self._build_error: str | None = None
        self._problem: str | None = None
        self._listed: set[int] = set()
        self._refused: dict[int, _Refusal] = {}

    @property
    def has_finished(self) -> bool:
        """Whether the loaded checkpoint is the last one of the training.

        The training may be extended, and another run may replace this one.
        """
        return (
            self.model is not None
            and self.step is not None
            and self.step >= self.model.settings["max_steps"]
        )

    def look(self) -> bool:
        """Loads the newest checkpoint if it is new and can be used.

        Returns:
            Whether a checkpoint was loaded.

        Raises:
            UsageError: The directory cannot be read, or its model cannot be built.
        """
        self._problem = None
        try:
            description = layout.description(self.directory)
            if description is None:
                return False
            self._notice_replacement()
            return self._load_newest(self._described_model(description))
        except FileNotFoundError:  # Not written yet, or just being moved aside.
            return False
        except UsageError as error:
            self._problem = str(error)
            self._add_refusal(str(error))
            raise

    def follow(
        self,
        interval: float,
        *,
        once: bool = False,
        look: Callable[[], bool] | None = None,
    ) -> Iterator[int]:
        """Loads checkpoints until the training has finished.

        Messages, on refusals and on waiting, go to stderr, each of them once.

        Args:
            interval: Seconds between two looks.
            once: Whether to end after the newest checkpoint.
            look: Called in place of `look`.

        Yields:
            The step of each checkpoint, as soon as it is loaded.

        Raises:
            UsageError: As `look`, or there is no usable checkpoint to look at `once`.
        """
        look = look or self.look
        printed: set[str] = set()

        def warn(message: str) -> None:
            if message not in printed:
                print(message, file=sys.stderr, flush=True)
                printed.add(message)

        while True:
            is_new = look()
            if once and not is_new:
                raise UsageError(self.why_no_weights())
            for refusal in self.refusals:
                warn(refusal)
            if is_new and self.step is not None:
                yield self.step
                if once:
                    return
                continue  # There may be news by now, such as a later end.
            if self.has_finished:
                warn(f"The training has finished at step {self.step}.")
                return
            waiting = (
                self.why_no_weights()
                if self.step is None
                else f"Waiting for a checkpoint after step {self.step} in "
                f"{self.directory}."
            )
            warn(f"{waiting} Looking every {interval:g} s.")
            time.sleep(interval)

    def why_no_weights(self) -> str:
        """Returns why no checkpoint is loaded yet, and what to do."""
        if self._problem:
            return self._problem
        if not self.directory.is_dir():
            return f"{self.directory} does not exist; no training has begun there."
        if not (self.directory / layout.CONFIG).exists():
            return (
                f"{self.directory} holds no run: there is no {layout.CONFIG} of "
                "train.py or train_multi_gpu.py in it."
            )
        return (
            f"There is no checkpoint in {self.directory} yet; the training writes the "
            "first."
        )

    def close(self) -> None:
        """Forgets the run."""
        if self._opened is not None:
            os.close(self._opened)
        self._opened = self.model = self.step = self._description = None
        self._listed, self._refused = set(), {}

    def _notice_replacement(self) -> None:
        """Forgets the run if the folder of checkpoints is another one by now."""
        try:
            current = self._folder.stat()
            if self._opened is None or not _is_open_as(self._opened, current):
                self.close()
                # As long as it is open, no other folder gets its inode number.
                self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise files.unreadable(self._folder, error) from error

    def _described_model(self, description: bytes) -> ModelT:
        """Returns the model that a `config.json` describes, built if that has changed.

        After an error that may pass it is built anew at the next look.
        """
        if description != self._description:
            self._description = self.model = self._build_error = None
            try:
                self.model = self._build()
            except UsageError as error:
                if not _may_pass(error):
                    self._description, self._build_error = description, str(error)
                raise
            self._description = description
            self._refused.clear()  # A checkpoint may fit the new model.
        if self.model is None:
            raise UsageError(self._build_error)
        return self.model

    def _load_newest(self, model: ModelT) -> bool:
        steps = checkpoints.steps(self._folder)
        loaded = -1 if self.step is None else self.step
        for step in steps:
            if step < loaded and step not in self._listed:
                self._add_refusal(
                    f"The checkpoint of step {step} is refused: it is older than the "
                    f"weights of step {loaded}."
                )
        self._listed = set(steps)
        states = {
            step: _file_states(checkpoints.folder(self._folder, step))
            for step in steps
            if step > loaded
        }
        unchanged = {
            step: refusal
            for step, refusal in self._refused.items()
            if step in states and states[step] == refusal.file_states
        }
        newest, refused = restoring.restore_newest(
            self._folder,
            model.load,
            model.settings,
            skip={*unchanged, *(step for step in steps if step <= loaded)},
            tolerate=_REFUSED,
        )
        self._refused = unchanged
        for step, error in refused.items():
            known = isinstance(error, DamagedError | UsageError)
            why = str(error) if known else f"{reason(error)}."
            again = _may_pass(error)
            self._refused[step] = _Refusal(why, None if again else states.get(step))
            self._add_refusal(f"The checkpoint of step {step} is refused: {why}")
        if newest is None:
            if self._refused:
                reasons = {step: self._refused[step].reason for step in self._refused}
                self._problem = str(restoring.none_usable(self._folder, reasons))
            return False
        self.step = newest.step
        return True

    def _add_refusal(self, refusal: str) -> None:
        if refusal not in self.refusals:
            self.refusals.append(refusal)


def _is_open_as(descriptor: int, current: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), current)
    except OSError:  # NFS forgets a folder that another machine has deleted.
        return False


def _may_pass(error: Exception) -> bool:
    """Returns whether an error says nothing about the files that were read."""
    known = isinstance(error, DamagedError | UsageError)
    cause = error.__cause__ if known else error
    if isinstance(cause, OSError):
        return not isinstance(cause, _WRONG_FILES)
    if isinstance(cause, tf.errors.OpError):
        return not isinstance(cause, _WRONG_CONTENT)
    return isinstance(cause, MemoryError)


def _file_states(folder: Path) -> _FileStates:
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:  # Deleted meanwhile, or unreadable; loading reports it.
        return frozenset()
    return frozenset((name, stat.st_size, stat.st_ctime_ns) for name, stat in stats)
