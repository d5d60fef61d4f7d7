"""How a training on several sets of variables differs: the chief writes for all."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any

import tensorflow as tf

from cifar10.config.config import Config, ResolvedConfig
from cifar10.distributed import rendezvous, strategy as strategies
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.process.signals import StopSignals
from cifar10.run_directory.gains import Gains
from cifar10.towers.devices import Placement
from cifar10.training import settings as run_settings
from cifar10.training.progress import Progress, Restored
from cifar10.training.validation import Validation


def connect(
    config: Config, placement: Placement, cluster: Cluster | None, stop: StopSignals
) -> tuple[tf.distribute.Strategy | None, int]:
    """Connects the workers, before TensorFlow's first operation.

    Returns what `strategy.choose` does. A signal ends the wait for the others.
    """
    with stop.at_once():
        strategy, replicas = strategies.choose(
            config.variable_update, placement, cluster, config.worker_timeout
        )
    stop.reinstall()
    if cluster:
        stop.defer()  # The others would take it for a loss: all stop after one step.
    return strategy, replicas


def begin(
    cluster: Cluster, settings: dict[str, Any], begin_chief: Callable[[], list[str]]
) -> list[str]:
    """Compares how the workers were started, and lets the chief restore the run.

    Returns messages for the user of this process.
    """
    timeout = settings["worker_timeout"]
    rendezvous.compare(cluster, run_settings.alike(settings), timeout)
    return rendezvous.after_chief(cluster, begin_chief, timeout) or [
        f"{cluster.this_worker}; {cluster.workers[0]} prints and writes."
    ]


class AgreedStop:
    """The signal on which all workers stop, after the same step."""

    def __init__(self, stop: StopSignals, towers: ReplicaBuilder) -> None:
        self._stop = stop
        self._towers = towers

    @property
    def requested(self) -> Signals | None:
        """The signal that one of the workers has received, once all know of it."""
        return self._towers.agree_to_stop(self._stop.requested)


class SharedValidation:
    """The chief's scores for all workers, which wait for them after the same step."""

    def __init__(self, towers: ReplicaBuilder, of_chief: Validation | None) -> None:
        self._towers = towers
        self._of_chief = of_chief  # None on the others, which have no test set.

    def begin(self, step: int) -> None:
        """Forgets, on the chief, the scores of later steps."""
        if self._of_chief:
            self._of_chief.begin(step)

    def score(self, progress: Progress) -> tuple[str, dict[str, float]]:
        """Scores on the chief, and gives all what it found; every process calls it."""
        scored = self._of_chief.score(progress) if self._of_chief else ("", {})
        shared = self._towers.share(dataclasses.astuple(progress.gains))
        progress.gains = Gains(*shared)
        return scored


class SharedProgress(Progress):
    """The step of a run as the chief, which has its checkpoints, keeps it for all."""

    def __init__(
        self,
        train_dir: Path,
        towers: ReplicaBuilder,
        config: ResolvedConfig,
        examples_per_epoch: int,
    ) -> None:
        super().__init__(train_dir, towers.state, config, examples_per_epoch)
        self._towers = towers

    def share(self) -> None:
        """Gives the chief's state to all replicas; every process calls it."""
        numbers = [self.step, self.left_out, self.skipped_steps]
        numbers += dataclasses.astuple(self.gains)
        numbers = self._towers.synchronize(numbers)
        self.step, self.left_out, self.skipped_steps, *gains = numbers
        self.gains = Gains(*gains)

    def roll_back(self) -> Restored:
        """Restores the newest checkpoint on all replicas; every process calls it."""
        restored = self.restore()
        self.share()
        return restored


class WorkersProgress(SharedProgress):
    """The step of a run on a worker that is not the chief: it has no checkpoints."""

    def restore(self) -> Restored:
        """Restores nothing: `share` brings the chief's state."""
        return Restored([], "", {})

    def save(self, *unused: object, **also_unused: object) -> None:
        """Writes nothing."""

    def save_for_debugging(self, *unused: object) -> None:
        """Writes nothing."""

    def is_saved(self) -> bool:
        """Returns that there is nothing to save here."""
        return True

    def has_checkpoint(self) -> bool:
        """Returns that there is a checkpoint, as far as this worker knows."""
        return True

    def how_to_resume(self) -> str:
        """Returns who knows the last checkpoint."""
        return "The chief reports which checkpoint is the last."
