"""A live copy of the model of a run: it follows the training, on its own device.

    with Follower("runs/cifar10_train").start() as follower:
        step, logits, class_names = follower.predict(images)

`Follower` loads each new checkpoint of a run, from any process. It refuses checkpoints
that are damaged or of another run or model, and keeps answering with the last good one.
`Follower.attach` follows a training in the same process, without a disk.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Self

from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.follower.attached import AttachedCopy
from cifar10.follower.followed_run import FollowedRun
from cifar10.follower.live_copy import LiveCopy, Network
from cifar10.follower.trained_model import TrainedModel
from cifar10.run_directory import checkpoints

logger = logging.getLogger(__name__)


class Follower(FollowedRun, LiveCopy):
    """A copy of a run's model that loads each new checkpoint, or a certain one.

    Nothing is read before `look` or `start`, so the training may begin later.

    Args:
        train_dir: Directory of the run.
        device: Device where the copy lives and computes.
        step: The step of the checkpoint to load, or `best` for the one with the best
            score, and each better one as it appears; None for each newer one.
        use_averages: Whether to use the variables' moving averages, as an evaluation
            does, in place of their last values.
        trust_model: `module:function` that the run may use as its model even if this
            user did not train it here.
    """

    # Makes a copy that follows a training in this process, without a disk.
    attach = AttachedCopy

    def __init__(
        self,
        train_dir: str | Path,
        device: str = "/cpu:0",
        *,
        step: int | str | None = None,
        use_averages: bool = True,
        trust_model: str | None = None,
    ) -> None:
        LiveCopy.__init__(self)
        directory = layout.locate_run(str(train_dir))
        reading = {"use_averages": use_averages, "trust_model": trust_model}
        FollowedRun.__init__(self, directory, device, wanted=step, **reading)
        self._began = 0.0
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def refused(self) -> int:
        """Number of checkpoints or runs that were refused; see `refusals`."""
        return len(self.refusals)

    def start(self, interval: float = 1.0) -> Self:
        """Looks now, and then every `interval` seconds in a thread until `close`."""
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
            super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def look(self) -> bool:
        """Loads the newest checkpoint, and returns whether other weights answer now.

        A directory or checkpoint that cannot be used is no error; `refusals` names it.
        """
        with self._looking:
            self._began = time.perf_counter()
            try:
                return super().look()
            except UsageError:
                return False

    def _watch(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.look()
            except Exception:
                # A bug here or in the user's model. If the thread ended, the copy would
                # silently be out of date.
                logger.exception("The follower of %s failed to look.", self.directory)

    def _prepare(self, model: TrainedModel) -> None:
        self._network = Network(
            model.model, model.settings, model.class_names, self._device
        )
        self._began = time.perf_counter()  # Building the model is no part of a swap.

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        weights = self._network.weights(
            checkpoint.step, model.trainable, model.non_trainable
        )
        written = (checkpoint.path / checkpoints.MANIFEST).stat().st_mtime
        self._swap(self._network, weights, written, self._began)
