"""The results of steps: whether they are finite, and the losses' moving averages.

Looking at a number waits for the device that computes it. So results are collected and
looked at together, when a line is logged or a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# The decay of the losses' moving averages, the tutorial's: smoother curves to read.
LOSS_AVERAGE_DECAY = 0.9
_LOSSES = ("total_loss", "cross_entropy", "weight_decay")


class NotFiniteError(Exception):
    """A loss or gradient is not finite; the message names step and tower."""


class Results:
    """Collects the results of steps until they are looked at.

    Args:
        devices: The towers' devices, in order, for messages.

    Attributes:
        loss_averages: Moving average of each loss over the steps looked at.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.loss_averages: dict[str, float] = {}
        self._devices = tuple(devices)
        self._pending: list[tuple[int, dict[str, tf.Tensor], tf.Tensor]] = []

    def add(
        self, step: int, metrics: dict[str, tf.Tensor], tower_losses: tf.Tensor
    ) -> None:
        """Adds the result of one call, without waiting for its numbers.

        Args:
            step: The step, the last one of the call.
            metrics: Scalars by name, among them the losses and `gradient_norm`; with a
                leading dimension of steps if the call ran several.
            tower_losses: floating [towers] or [steps, towers].
        """
        self._pending.append((step, metrics, tower_losses))

    def wait(self) -> None:
        """Waits for the devices, so that what follows is not blamed for their time."""
        if self._pending:
            self._pending[-1][2].numpy()

    def look(self) -> dict[str, float]:
        """Checks and averages the results added since the last look.

        Returns:
            The metrics of the newest step; empty if there is none.

        Raises:
            NotFiniteError: A loss or gradient is not finite.
        """
        newest: dict[str, float] = {}
        for last_step, metrics, tower_losses in self._pending:
            losses = np.atleast_2d(tower_losses.numpy())
            values = {name: np.atleast_1d(one.numpy()) for name, one in metrics.items()}
            for number in range(len(losses)):
                newest = {name: float(ones[number]) for name, ones in values.items()}
                step = last_step - (len(losses) - 1 - number)
                self._check(step, losses[number], newest["gradient_norm"])
                if newest.get("loss_scale", 1.0) < 1.0:
                    raise NotFiniteError(
                        f"at step {step} the gradients are not finite in float16 "
                        "however little the loss is scaled"
                    )
                self._average(newest)
        self._pending.clear()
        return newest

    def _average(self, newest: dict[str, float]) -> None:
        for name in _LOSSES:
            average = self.loss_averages.get(name, newest[name])
            average += (1 - LOSS_AVERAGE_DECAY) * (newest[name] - average)
            self.loss_averages[name] = average

    def _check(self, step: int, losses: np.ndarray, gradient_norm: float) -> None:
        for tower in np.flatnonzero(~np.isfinite(losses)):
            raise NotFiniteError(
                f"at step {step} the loss of tower {tower} ({self._devices[tower]}) is "
                f"{losses[tower]}"
            )
        if not np.isfinite(gradient_norm):
            raise NotFiniteError(
                f"at step {step} the norm of the averaged gradients is {gradient_norm}"
            )
