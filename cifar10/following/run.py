"""What a follower knows of the run in a directory: whose it is, what is new in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cifar10 import checkpoints, files, readers, records, run_directory
from cifar10.errors import UsageError
from cifar10.following.live_copy import Network, Weights
from cifar10.trained_model import TrainedModel

_IMAGE_SHAPE = (records.HEIGHT, records.WIDTH, records.CHANNELS)

# What a checkpoint's manifest and the configuration of its run have in common.
_OF_THE_RUN = ("seed", "global_batch_size")

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
        self._folder = directory / run_directory.CHECKPOINTS
        # While it is open no other folder gets its number.
        with _sentences(self._folder):
            self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        self._description: bytes | None = None
        self._built: tuple[TrainedModel, Network] | None = None
        self._seen: dict[int, _State] = {}

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
            return not os.path.samestat(os.fstat(self._opened), self._folder.stat())

    def describe(self, description: bytes) -> None:
        """Builds the model that the run's `config.json` describes, if that is new.

        A session that goes on with the run writes it anew.

        Args:
            description: Its content.

        Raises:
            UsageError: There is no such model.
        """
        if description == self._description:
            return
        self._description = description
        self._built = None
        trained = TrainedModel(self._directory, self._device)
        network = Network(
            trained.model,
            trained.settings["distortions"],
            _IMAGE_SHAPE,
            trained.class_names,
            self._device,
        )
        self._built = (trained, network)
        # What did not fit the model before may fit it now.
        for step in [step for step in self._seen if step > self.step]:
            del self._seen[step]

    def news(self) -> tuple[list[int], list[int]]:
        """Looks for checkpoints.

        Returns:
            The steps of those after the last one taken that are new or other than at
            the last look, newest first; and of those before it that were never seen.
            There are none as long as there is no model.
        """
        if self._built is None:
            return [], []
        later, earlier = [], []
        for step in reversed(checkpoints.steps(self._folder)):
            if step < self.step and step not in self._seen:
                earlier.append(step)
            state = _state(checkpoints.folder(self._folder, step))
            if step > self.step and state != self._seen.get(step):
                later.append(step)
            self._seen[step] = state
        return later, earlier

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
