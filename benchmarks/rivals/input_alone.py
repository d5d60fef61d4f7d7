"""Our input without a training: batches through their prefetch queue, thrown away."""

from __future__ import annotations

from benchmarks.rivals import common
from cifar10 import cli, datasets


def start(*, batch_size: int, dataset: datasets.Dataset) -> InputAlone:
    """Starts the input of one tower.

    Args:
        batch_size: Images in a batch.
        dataset: What to read; the tutorial's distortions are applied.
    """
    cli.import_tensorflow(verbose=False)
    return InputAlone(batch_size, dataset)


class InputAlone:
    """The queue, and someone who does nothing but take from it."""

    precision = "float32"

    def __init__(self, batch_size: int, dataset: datasets.Dataset) -> None:
        self._queues = common.tutorial_queues(dataset, batch_size, ["/cpu:0"])

    def run(self, untimed: int, timed: int) -> float:
        """Takes batches; returns the seconds of the timed ones."""
        return common.seconds_of(self._step, untimed, timed)

    def close(self) -> None:
        """Stops the input."""
        self._queues.close()

    def _step(self) -> float:
        self._queues.get()
        return 0.0
