"""What a follower knows of the run in a directory: whose it is, what is new in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.follower.live_copy import Network, Weights
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import records
from cifar10.run_directory import checkpoints, files, layout, readers

_IMAGE_SHAPE = (records.HEIGHT, records.WIDTH, records.CHANNELS)

# What a checkpoint's manifest and the configuration of its run have in common.
_OF_THE_RUN = ("seed", "global_batch_size")

# What is raised where the fault is in the files, however often they are read.
_WRONG_FILES = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_WRONG_CONTENT = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
)

# Size and time of change of each file of a checkpoint.
_State = frozenset[tuple[str, int, int]]


class FollowedRun:
    """The run in a directory, and the variables that its checkpoints are read into.

    Args:
        directory: Directory of the run.
        device: Where the variables are and the model computes.
        use_averages: Whether the moving averages are read, not the last values.

    Attributes:
        step: The step of the last checkpoint that was taken; -1 before the first.

    Raises:
        FileNotFoundError: It has no checkpoints yet.
        UsageError: They cannot be looked into.
    """

    def __init__(self, directory: Path, device: str, *, use_averages: bool) -> None:
        self.step = -1
        self._directory = directory
        self._device = device
        self._use_averages = use_averages
        self._folder = directory / layout.CHECKPOINTS
        # While it is open no other folder gets its number.
        with _sentences(self._folder):
            self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        self._description: bytes | None = None
        self._built: tuple[TrainedModel, Network] | None = None
        self._no_model: str | None = None
        self._listed: set[int] = set()
        self._found: dict[int, _State] = {}
        # Why, and in which state it is not to be read again.
        self._refused: dict[int, tuple[str, _State | None]] = {}

    def close(self) -> None:
        """Lets the folder go."""
        os.close(self._opened)

    @property
    def has_finished(self) -> bool:
        """Whether the last checkpoint that was taken is the last of the training."""
        if self._built is None:
            return False
        return self.step >= self._built[0].settings["max_steps"]

    def is_replaced(self) -> bool:
        """Whether another run is in the directory by now, as after --fresh.

        That moves the earlier run aside, and its folder of checkpoints with it.

        Raises:
            FileNotFoundError: There is none at this moment.
            UsageError: This user may not look.
        """
        with _sentences(self._folder):
            there = self._folder.stat()
        try:
            return not os.path.samestat(os.fstat(self._opened), there)
        except OSError:  # NFS forgets what another machine has deleted.
            return True

    def describe(self, description: bytes) -> None:
        """Builds the model that the run's `config.json` describes, if that is new.

        A session that goes on with the run writes it anew.

        Args:
            description: Its content.

        Raises:
            UsageError: There is no such model.
        """
        if description == self._description:
            if self._no_model is not None:
                raise UsageError(self._no_model)
            return
        # It is kept at the end: after a fault of disk or code all this is done anew.
        self._description = self._built = self._no_model = None
        try:
            trained = TrainedModel(self._directory, self._device)
        except UsageError as error:
            if not isinstance(error.__cause__, OSError):
                self._description, self._no_model = description, str(error)
            raise
        network = Network(
            trained.model,
            trained.settings["distortions"],
            _IMAGE_SHAPE,
            trained.class_names,
            self._device,
        )
        self._built = (trained, network)
        self._description = description
        self._refused.clear()  # What did not fit the model before may fit it now.

    def news(self) -> tuple[list[int], list[int]]:
        """Looks for checkpoints.

        Returns:
            The steps of those after the last one taken, newest first, without those
            that are as they were when they were refused; and of those before it that
            were not there at the last look. There are none as long as there is no
            model.
        """
        if self._built is None:
            return [], []
        steps = checkpoints.steps(self._folder)[::-1]
        earlier = [one for one in steps if one < self.step and one not in self._listed]
        self._listed = set(steps)
        after = [step for step in steps if step > self.step]
        self._found = {
            step: _state(checkpoints.folder(self._folder, step)) for step in after
        }
        self._refused = {
            step: self._refused[step] for step in after if step in self._refused
        }
        later = [
            step
            for step in after
            if step not in self._refused or self._refused[step][1] != self._found[step]
        ]
        return later, earlier

    def refuse(self, step: int, why: str, *, again: bool) -> None:
        """Keeps why a checkpoint that `news` has named was refused.

        Args:
            step: Its step.
            why: The reason, as a sentence.
            again: Whether `news` is to name it again although nothing in it changes.
        """
        self._refused[step] = (why, None if again else self._found[step])

    def why_refused(self) -> str | None:
        """Returns why the newest checkpoint that still is refused was so, if any."""
        reasons = (self._refused[step][0] for step in sorted(self._refused)[::-1])
        return next(reasons, None)

    def read(self, step: int) -> tuple[Network, Weights, float]:
        """Reads a checkpoint that `news` has named, all of it or an error.

        Returns:
            The model, its weights, and when they were written, as `time.time` counts.

        Raises:
            DamagedError: It is not what was written.
            UsageError: It is of another run or model, or cannot be read.
            FileNotFoundError: It is not there any more.
        """
        if self._built is None:
            raise ValueError(f"{self._directory} has not been described.")
        trained, network = self._built
        manifest = checkpoints.folder(self._folder, step) / checkpoints.MANIFEST
        # The training does not delete it meanwhile.
        with readers.reading(manifest):
            checkpoint = checkpoints.verify(self._folder, step)
            for name in _OF_THE_RUN:
                there = checkpoint.manifest.get(name)
                here = trained.settings.get(name)
                if there != here:
                    raise UsageError(
                        f"{checkpoint.path} is of another run: its {name} is {there}, "
                        f"and this run's is {here}."
                    )
            trained.load(checkpoint, averages_only=self._use_averages)
            written = manifest.stat().st_mtime
        weights = network.weights(
            step,
            trained.values(use_averages=self._use_averages),
            [one.value for one in trained.model.non_trainable_variables],
        )
        return network, weights, written


def may_pass(error: Exception) -> bool:
    """Tells a fault that says nothing about what was to be read, and so may pass.

    Args:
        error: What the reading raised.
    """
    known = isinstance(error, checkpoints.DamagedError | UsageError)
    cause = error.__cause__ if known else error
    if isinstance(cause, OSError):
        return not isinstance(cause, _WRONG_FILES)
    if isinstance(cause, tf.errors.OpError):
        return not isinstance(cause, _WRONG_CONTENT)
    return isinstance(cause, MemoryError)


@contextlib.contextmanager
def _sentences(folder: Path) -> Iterator[None]:
    """Turns what the system says of a folder that is there into a sentence."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise files.unreadable(folder, error) from error


def _state(folder: Path) -> _State:
    """Returns what changes whenever a file in a folder does."""
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:  # Deleted meanwhile, or not ours to read; reading it will tell.
        return frozenset()
    return frozenset((name, one.st_size, one.st_ctime_ns) for name, one in stats)
