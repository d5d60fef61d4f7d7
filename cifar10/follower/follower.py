"""A live copy of the model of a run: it follows the training, on a device of its own.

    with Follower("/tmp/cifar10_train").start() as follower:
        step, logits, class_names = follower.predict(images)

`Follower` loads each new checkpoint of a run, from any process. It refuses checkpoints
that are damaged or of another run or model, and keeps answering with the last good one.
`Follower.attach` follows a training in the same process, without a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from cifar10.errors import UsageError
from cifar10.follower.attached import AttachedCopy
from cifar10.follower.followed_run import FollowedRun
from cifar10.follower.live_copy import LiveCopy, Network, Weights
from cifar10.follower.trained_model import TrainedModel
from cifar10.run_directory import checkpoints, layout
from cifar10.towers.train_state import TrainState

logger = logging.getLogger(__name__)


class Follower(LiveCopy):
    """A copy of a run's model that loads each new checkpoint.

    Nothing is read before `look` or `start`, so the training may begin later.

    Args:
        train_dir: Directory of the run.
        device: Device where the copy lives and computes.
        use_averages: Whether to use the variables' moving averages, as an evaluation
            does, in place of their last values.

    Attributes:
        directory: Directory of the run.
    """

    def __init__(
        self,
        train_dir: str | Path,
        device: str = "/cpu:0",
        *,
        use_averages: bool = True,
    ) -> None:
        super().__init__()
        self.directory = layout.locate(str(train_dir))
        self._device = device
        self._use_averages = use_averages
        self._run = FollowedRun(self.directory, self._build)
        self._began = 0.0
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def attach(
        state: TrainState,
        settings: Mapping[str, Any],
        *,
        every: int = 1,
        device: str = "/cpu:0",
        use_averages: bool = True,
    ) -> AttachedCopy:
        """Makes a copy that follows a training in this process, without a disk.

        Args:
            state: The variables that the training updates.
            settings: The content of its `config.json`.
            every: Steps from one copy to the next; the last step is always copied.
            device: Device where the copy lives and computes.
            use_averages: As for a follower of checkpoints.

        Returns:
            The copy. The training has to call its `after_step`; pass it to
            `training.train` in its `follow` argument.
        """
        return AttachedCopy(state, settings, every, device, use_averages=use_averages)

    @property
    def refused(self) -> int:
        """Number of checkpoints and descriptions of a run that were refused."""
        return len(self._run.refusals)

    @property
    def refusals(self) -> list[str]:
        """Why they were refused, one sentence each."""
        return list(self._run.refusals)

    @property
    def has_finished(self) -> bool:
        """Whether the weights are those of the training's last step."""
        return self._run.has_finished

    def start(self, interval: float = 1.0) -> Self:
        """Looks now, and then in a thread of its own until `close`.

        Args:
            interval: Seconds between two looks.
        """
        self.look()
        self._thread = threading.Thread(
            target=self._watch, args=(interval,), name="follower", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops looking; the last weights keep answering."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        with self._looking:
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def look(self) -> bool:
        """Loads the newest checkpoint if it is new and can be used.

        A directory or checkpoint that cannot be used is no error; `refusals` names it.

        Returns:
            Whether other weights answer now.
        """
        with self._looking:
            self._began = time.perf_counter()
            try:
                return self._run.look()
            except UsageError:
                return False

    def follow(self, interval: float, *, once: bool = False) -> Iterator[int]:
        """Looks until the training has finished; see `FollowedRun.follow`."""
        return self._run.follow(interval, once=once, look=self.look)

    def why_no_weights(self) -> str:
        """Returns why there are no weights yet, and what to do."""
        return self._run.why_no_weights()

    def _watch(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.look()
            except Exception:
                # A fault of ours, or of the user's model. If the thread ended, the copy
                # would be silently out of date.
                logger.exception("The follower of %s failed to look.", self.directory)

    def _build(self) -> _CopiedModel:
        model = _CopiedModel(
            self.directory, self._device, self._put_in_place, self._use_averages
        )
        self._began = time.perf_counter()
        return model

    def _put_in_place(self, network: Network, weights: Weights, written: float) -> None:
        self._swap(network, weights, written, self._began)


class _CopiedModel(TrainedModel):
    """The model of a run; what is loaded is copied and handed to `use`."""

    def __init__(
        self,
        directory: Path,
        device: str,
        use: Callable[[Network, Weights, float], None],
        use_averages: bool,
    ) -> None:
        super().__init__(directory, device, use_averages=use_averages)
        distortion = self.settings["distortions"]
        self._network = Network(self.model, distortion, self.class_names, device)
        self._use = use

    def load(self, checkpoint: checkpoints.Checkpoint) -> None:
        super().load(checkpoint)
        weights = self._network.weights(
            checkpoint.step, self.trainable, self.non_trainable
        )
        written = (checkpoint.path / checkpoints.MANIFEST).stat().st_mtime
        self._use(self._network, weights, written)
