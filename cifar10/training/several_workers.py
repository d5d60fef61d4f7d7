"""How a training on several sets of variables differs: the chief writes for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from typing import Any

import tensorflow as tf

from cifar10.config.config import Config, ResolvedConfig
from cifar10.config.signals import StopSignals
from cifar10.distributed import rendezvous, strategy as strategies
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.towers.devices import Placement
from cifar10.training import settings as run_settings
from cifar10.training.progress import Progress, Restored


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


class SharedProgress(Progress):
    """The step of a run whose checkpoints the chief has, and the other workers not."""

    def __init__(
        self,
        train_dir: Path,
        towers: ReplicaBuilder,
        config: ResolvedConfig,
        examples_per_epoch: int,
        *,
        is_chief: bool,
    ) -> None:
        super().__init__(train_dir, towers.state, config, examples_per_epoch)
        self._towers = towers
        self._is_chief = is_chief

    def share(self) -> None:
        """Gives the chief's state to all replicas; every process calls it."""
        self.step, self.left_out, self.skipped_steps = self._towers.synchronize(
            [self.step, self.left_out, self.skipped_steps]
        )

    def roll_back(self) -> Restored:
        """Restores the newest checkpoint on all replicas; every process calls it."""
        restored = super().restore() if self._is_chief else Restored([], "", {})
        self.share()
        return restored

    def save(self, loss_averages: Mapping[str, float], *, last: bool) -> None:
        """As in `Progress`, on the chief."""
        if self._is_chief:
            super().save(loss_averages, last=last)

    def is_saved(self) -> bool:
        """Returns whether this process has nothing to save at the step reached."""
        return not self._is_chief or super().is_saved()

    def save_for_debugging(
        self,
        directory: Path,
        loss_averages: Mapping[str, float],
        facts: Mapping[str, Any],
    ) -> Path | None:
        """As in `Progress`, on the chief."""
        if not self._is_chief:
            return None
        return super().save_for_debugging(directory, loss_averages, facts)

    def has_checkpoint(self) -> bool:
        """Returns whether there is a checkpoint, as far as this process knows."""
        return not self._is_chief or super().has_checkpoint()

    def how_to_resume(self) -> str:
        """As in `Progress`, on the chief."""
        if not self._is_chief:
            return "The chief reports which checkpoint is the last."
        return super().how_to_resume()
