"""Our input without a training: batches made and thrown away."""

from __future__ import annotations

import contextlib

from benchmarks.rivals import common
from cifar10.input import datasets
from cifar10.process import entry_point


def start(*, batch_size: int, dataset: datasets.Dataset) -> InputAlone:
    """Starts the input of one tower.

    Args:
        batch_size: Images in a batch.
        dataset: What to read; the tutorial's distortions are applied.
    """
    entry_point.import_tensorflow()
    return InputAlone(batch_size, dataset)


class InputAlone:
    """The queue, and someone who does nothing but take from it."""

    precision = "float32"

    def __init__(self, batch_size: int, dataset: datasets.Dataset) -> None:
        from cifar10.towers import devices

        placement = devices.place_towers(1)
        self._stack = contextlib.ExitStack()
        batches = common.tutorial_batches(dataset, batch_size, placement)
        self._batches = self._stack.enter_context(batches)

    def run(self, untimed: int, timed: int) -> float:
        """Takes batches; returns the seconds of the timed ones."""
        return common.seconds_of(
            self._batches.get,
            untimed,
            timed,
            wait=lambda batches: float(batches[0][1][0]),  # A label.
        )

    def close(self) -> None:
        """Stops the input."""
        self._stack.close()
