"""The tutorial's own graph, in a process of its own."""

from __future__ import annotations

import numpy as np

from benchmarks.rivals import common
from cifar10.input import datasets
from cifar10.process import entry_point


def start(*, batch_size: int, dataset: datasets.Dataset) -> Tutorial:
    """Builds the graph, its queues included.

    Args:
        batch_size: Images in a step.
        dataset: The real CIFAR-10.
    """
    entry_point.import_tensorflow()
    return Tutorial(batch_size, dataset)


class Tutorial:
    """The graph in its session."""

    precision = "float32"

    def __init__(self, batch_size: int, dataset: datasets.Dataset) -> None:
        import tensorflow as tf

        from benchmarks.tutorial_graph import TutorialGraph

        tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
        self._graph = TutorialGraph(dataset.directory, batch_size)

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the loss and the gradients that the graph's update applies."""
        theirs = {"kernel": "weights", "bias": "biases"}
        names = {}  # Ours by theirs.
        for name in values:
            layer, _, kind = name.partition("/")
            names[f"{layer}/{theirs[kind]}"] = name
        self._graph.load({name: values[ours] for name, ours in names.items()})
        with common.full_float32():
            loss, gradients = self._graph.loss_and_gradients(images, labels)
        return loss, {names[name]: value for name, value in gradients.items()}

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        return common.seconds_of(self._graph.step, untimed, timed)

    def close(self) -> None:
        """Stops the graph's threads."""
        self._graph.close()
