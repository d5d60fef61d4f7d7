"""Our towers: any Keras model, computed by towers and updated in one place.

Network, optimizer, values and predictions are those of `cnn_keras.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from benchmarks.rosetta import cnn_keras
from benchmarks.rosetta.task import Batch, Task
from cifar10.model import inference, loss
from cifar10.towers import devices
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update


class Model(cnn_keras.Model):
    """A network with its loss and its optimizer."""

    def __init__(self, task: Task, towers: int = 1) -> None:
        self.task = task
        placement = devices.place_towers(towers)
        home = placement.devices[0] if len(placement.devices) == 1 else "/cpu:0"
        with tf.device(home):
            self.network = self.build()
            self.optimizer = self.make_optimizer()
        self.builder = TowerBuilder(
            TrainState(self.network, self.optimizer, home),
            placement.devices,
            # Of logits: the only softmax is in this loss.
            tower=Tower(inference, loss),
            update=Update(
                lambda examples: tf.constant(task.learning_rate),  # noqa: ARG005
                average_decay=None,  # No other row keeps moving averages.
            ),
        )
        self.fresh = [one.numpy() for one in self.optimizer.variables]

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        losses = []
        for batch in batches:
            parts = [np.split(part, len(self.builder.devices)) for part in batch]
            tensors = [tuple(map(tf.constant, own)) for own in zip(*parts, strict=True)]
            losses.append(self.builder.step(tensors).metrics["total_loss"])
        return float(tf.reduce_mean(losses))
