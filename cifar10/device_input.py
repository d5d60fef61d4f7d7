"""The data set in the memory of the towers' devices, distorted where it is used.

For data sets that fit beside the model: nothing but the numbers of the images is sent
at each step. The batches are those of `input.training_batches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import tensorflow as tf

from cifar10.input import TowerBatch, distorted_batch

# A data set up to this size fits beside any model on any GPU of today; CIFAR-10 takes
# a seventh of it.
MOST_BYTES = 2**30


class DeviceInput:
    """Makes each tower's batch on its own device; stands in for `PrefetchQueues`.

    Args:
        images: uint8 [count, height, width, 3], the training set.
        labels: int32 [count].
        devices: The towers' device names, in order.
        batch_size: Images per tower and step.
        distortion: One of `distortions.CHOICES`.
        seed: Seed of the run.
        start_step: Steps to leave out at the beginning.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        devices: Sequence[str],
        *,
        batch_size: int,
        distortion: str,
        seed: int,
        start_step: int,
    ) -> None:
        self._devices = tuple(devices)
        self._step = start_step
        self._makers = [
            self._maker(
                number,
                images,
                labels,
                batch_size=batch_size,
                distortion=distortion,
                seed=seed,
            )
            for number in range(len(devices))
        ]

    def get(self) -> list[TowerBatch]:
        """Starts making the next batch of every tower.

        Returns:
            One (images, labels) per tower, on the tower's device.
        """
        step = tf.constant(self._step, tf.int64)
        self._step += 1
        batches = []
        for device, make in zip(self._devices, self._makers, strict=True):
            with tf.device(device):
                batches.append(make(step))
        return batches

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        """Has nothing to close."""

    def _maker(
        self,
        number: int,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        batch_size: int,
        distortion: str,
        seed: int,
    ) -> tf.types.experimental.PolymorphicFunction:
        device = self._devices[number]
        place = (number * batch_size, len(self._devices) * batch_size)
        with tf.device(device):
            all_images = tf.constant(images)
            all_labels = tf.constant(labels)

        @tf.function(autograph=False)
        def make(step: tf.Tensor) -> TowerBatch:
            return distorted_batch(
                all_images, all_labels, distortion, seed, step, place, batch_size
            )

        return make
