"""The results of steps: whether they are finite, and the losses' moving averages.

Looking at a number waits for the device that computes it. So results are collected and
looked at together, when a line is logged or a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

# The decay of the losses' moving averages, the tutorial's: smoother curves to read.
LOSS_AVERAGE_DECAY = 0.9
_LOSSES = ("total_loss", "cross_entropy", "weight_decay")


class NotFiniteError(Exception):
    """A loss or gradient is not finite; the message names step and tower.

    Attributes:
        step: The step.
        what: What of it is not finite.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"at step {step} {what}")
        self.step = step
        self.what = what


class LossScaleError(NotFiniteError):
    """Gradients overflow in float16 however little the loss is scaled."""


def is_finite(metrics: dict[str, tf.Tensor], tower_losses: tf.Tensor) -> bool:
    """Tells whether the losses and the gradients of a step are finite."""
    numbers = [*tower_losses.numpy(), metrics["gradient_norm"].numpy()]
    return bool(np.isfinite(numbers).all())


class Results:
    """Collects the results of steps until they are looked at.

    Args:
        devices: The towers' devices, in order, for messages.
        skips: Whether steps that are not finite are passed over; otherwise the first
            one is an error.

    Attributes:
        loss_averages: Moving average of each loss over the steps looked at.
        skipped: Steps that were passed over, since somebody cleared the list.
        skipped_in_a_row: How many of the newest steps were passed over.
    """

    def __init__(self, devices: Sequence[str], *, skips: bool = False) -> None:
        self.loss_averages: dict[str, float] = {}
        self.skipped: list[NotFiniteError] = []
        self.skipped_in_a_row = 0
        self._devices = tuple(devices)
        self._skips = skips
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

    def begin_anew(self, loss_averages: Mapping[str, float]) -> None:
        """Forgets all results, and goes on from these averages."""
        self._pending.clear()
        self.loss_averages = dict(loss_averages)

    def look(self) -> dict[str, float]:
        """Checks and averages the results added since the last look.

        Returns:
            The metrics of the newest step; empty if there is none.

        Raises:
            NotFiniteError: A loss or gradient is not finite, and such steps are not
                passed over.
            LossScaleError: No scale of the loss is small enough.
        """
        newest: dict[str, float] = {}
        for last_step, metrics, tower_losses in self._pending:
            losses = np.atleast_2d(tower_losses.numpy())
            values = {name: np.atleast_1d(one.numpy()) for name, one in metrics.items()}
            for number in range(len(losses)):
                newest = {name: float(ones[number]) for name, ones in values.items()}
                step = last_step - (len(losses) - 1 - number)
                self._take(step, newest, losses[number])
        self._pending.clear()
        return newest

    def _take(self, step: int, newest: dict[str, float], losses: np.ndarray) -> None:
        """Takes the numbers of one step in."""
        if wrong := self._what_is_not_finite(losses, newest["gradient_norm"]):
            error = NotFiniteError(step, wrong)
            if not self._skips:
                raise error
            self.skipped.append(error)
            self.skipped_in_a_row += 1
            return
        if newest.get("loss_scale", 1.0) < 1.0:
            raise LossScaleError(
                step,
                "the gradients are not finite in float16 however little the loss is "
                "scaled",
            )
        self.skipped_in_a_row = 0
        self._average(newest)

    def _average(self, newest: dict[str, float]) -> None:
        for name in _LOSSES:
            average = self.loss_averages.get(name, newest[name])
            average += (1 - LOSS_AVERAGE_DECAY) * (newest[name] - average)
            self.loss_averages[name] = average

    def _what_is_not_finite(self, losses: np.ndarray, gradient_norm: float) -> str:
        """Names a tower whose loss is not finite, or else the gradients' norm."""
        for tower in np.flatnonzero(~np.isfinite(losses)):
            return (
                f"the loss of tower {tower} ({self._devices[tower]}) is {losses[tower]}"
            )
        if not np.isfinite(gradient_norm):
            return f"the norm of the averaged gradients is {gradient_norm}"
        return ""
