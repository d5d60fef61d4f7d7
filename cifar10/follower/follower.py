"""A live copy of the model of a run: it follows the training, on a device of its own.

    with Follower("/tmp/cifar10_train").start() as follower:
        step, logits, class_names = follower.predict(images)

`Follower` takes each new checkpoint of a run, from any process. One that is not as it
was written, or not of this run and model, it refuses, and the last good one goes on
answering. `Follower.attach` follows a training in the same process, without a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import tensorflow as tf

from cifar10.errors import UsageError, reason
from cifar10.follower.attached import AttachedCopy
from cifar10.follower.live_copy import LiveCopy
from cifar10.follower.run import FollowedRun, may_pass
from cifar10.run_directory import layout
from cifar10.run_directory.checkpoints import DamagedError
from cifar10.towers.train_state import TrainState

logger = logging.getLogger(__name__)


class Follower(LiveCopy):
    """A copy of a run's model that takes each new checkpoint.

    Nothing is read before `look` or `start`, so the training may begin later.

    Args:
        train_dir: Directory of the run.
        device: Where the copy lives and computes.
        use_averages: Whether it takes the variables' moving averages, as an evaluation
            does, and not their last values.

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
        self._run: FollowedRun | None = None
        self._runs = 0
        self._refusals: dict[tuple[int, object], str] = {}
        self._hindrance: str | None = None
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
            state: What the training updates.
            settings: The content of its `config.json`.
            every: Steps from one copying to the next; the last step is always copied.
            device: Where the copy lives and computes.
            use_averages: As for a follower of checkpoints.

        Returns:
            The copy; the training has to call its `after_step` (`training.train` does
            so with what its `follow` returns).
        """
        return AttachedCopy(state, settings, every, device, use_averages=use_averages)

    @property
    def refused(self) -> int:
        """How many checkpoints and descriptions of a run were refused."""
        return len(self._refusals)

    @property
    def refusals(self) -> list[str]:
        """Why they were refused, one sentence each."""
        return list(self._refusals.values())

    @property
    def has_finished(self) -> bool:
        """Whether the weights are those of the training's last step.

        It may be made longer, and another run may begin in the directory.
        """
        run = self._run
        return run is not None and run.has_finished

    def start(self, interval: float = 1.0) -> Self:
        """Looks now, and then again and again in a thread of its own, until `close`.

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
        """Ends the looking; the last weights go on answering."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        with self._looking:
            self._forget_run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def look(self) -> bool:
        """Takes the newest checkpoint, if there is a new one that is good.

        What is wrong with the directory or a checkpoint is no error; it is kept in
        `refusals`.

        Returns:
            Whether other weights answer now.
        """
        with self._looking:
            try:
                run = self._current_run()
                if run is None:
                    self._hindrance = None
                    return False
                later, earlier = run.news()
            except FileNotFoundError:  # Not there yet, or just being moved aside.
                self._hindrance = None
                return False
            except UsageError as error:
                self._hindrance = str(error)
                self._refuse(str(error), str(error))
                return False
            for step in earlier:
                older = f"it is older than the weights of step {run.step}."
                self._refuse(step, f"The checkpoint of step {step} is refused: {older}")
            taken = any(self._take(run, step) for step in later)
            self._hindrance = run.why_refused()
            return taken

    def why_no_weights(self) -> str:
        """Says why there are no weights yet, and what to do."""
        directory = self.directory
        # A refusal of another run, or of what is mended by now, would mislead.
        if hindrance := self._hindrance:
            return hindrance
        if not directory.is_dir():
            return f"{directory} does not exist; no training has begun there."
        if not (directory / layout.CONFIG).exists():
            return (
                f"{directory} holds no run: there is no {layout.CONFIG} of "
                "train.py or train_multi_gpu.py in it."
            )
        return (
            f"There is no checkpoint in {directory} yet; the training writes the first."
        )

    def _watch(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.look()
            except Exception:
                # A fault of ours, or of the user's model. A copy that went on without
                # ever looking again would be silently out of date.
                logger.exception("The follower of %s failed to look.", self.directory)

    def _current_run(self) -> FollowedRun | None:
        """Returns the run in the directory; None if there is none."""
        description = layout.description(self.directory)
        if description is None:
            return None
        if self._run and self._run.is_replaced():
            self._forget_run()
        if self._run is None:
            self._run = FollowedRun(
                self.directory, self._device, use_averages=self._use_averages
            )
            self._runs += 1
        self._run.describe(description)
        return self._run

    def _forget_run(self) -> None:
        if self._run:
            self._run.close()
        self._run = None

    def _take(self, run: FollowedRun, step: int) -> bool:
        """Lets the weights of a checkpoint answer, unless it is refused."""
        began = time.perf_counter()
        try:
            network, weights, written = run.read(step)
            self._swap(network, weights, written, began)
        except FileNotFoundError:
            why, again = "it vanished while it was read.", True
        except (DamagedError, UsageError) as error:
            why, again = str(error), may_pass(error)
        except (OSError, MemoryError, tf.errors.ResourceExhaustedError) as error:
            why, again = f"{reason(error)}.", True
        else:
            run.step = step
            return True
        why = f"The checkpoint of step {step} is refused: {why}"
        run.refuse(step, why, again=again)
        self._refuse(step, why)
        return False

    def _refuse(self, what: int | str, why: str) -> None:
        """Keeps why something was refused; the same thing counts once."""
        self._refusals[self._runs, what] = why
