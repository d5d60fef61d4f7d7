"""How a training on several sets of variables differs: all stop and end together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from signal import Signals

from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.errors import StoppedError
from cifar10.towers.towers import TowerBuilder
from cifar10.training.signals import StopSignals


class AgreedStop:
    """The signal on which all workers stop, after the same step.

    Args:
        stop: The signals of this process.
        towers: Carries them to the other workers.
    """

    def __init__(self, stop: StopSignals, towers: ReplicaBuilder) -> None:
        self._stop = stop
        self._towers = towers

    @property
    def requested(self) -> Signals | None:
        """The signal that one of the workers has received, if all know of it."""
        return self._towers.agree_to_stop(self._stop.requested)


@contextlib.contextmanager
def meeting_at_the_end(towers: TowerBuilder) -> Iterator[None]:
    """Lets no worker leave before all have run the block, to its end or a signal."""
    try:
        yield
    except StoppedError:
        if isinstance(towers, ReplicaBuilder):
            towers.barrier()
        raise
    if isinstance(towers, ReplicaBuilder):
        towers.barrier()
