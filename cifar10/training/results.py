"""The results of steps: whether they are finite, their moving averages, sudden rises.

Reading a number waits for the device that computes it. So results are collected and
read together, when a line is logged or a checkpoint is due.
"""

import math
from collections.abc import Sequence

import numpy as np

from cifar10.errors import say
from cifar10.towers.graphs import split_numbers
from cifar10.towers.towers import StepResult
from cifar10.training.progress import Progress

# The decay of the moving averages, the tutorial's: smoother curves to read.
LOSS_AVERAGE_DECAY = 0.9
_AVERAGED = ("total_loss", "cross_entropy", "weight_decay", "precision @ 1")

# A few bad images do not spoil this many steps in a row: no later update would succeed.
MOST_SKIPPED_IN_A_ROW = 10

# A cross entropy above twice its average plus about what guessing among ten classes
# costs is not noise: batches of only 8 images stay below twice their average plus 0.4.
_RISE = 2.0
_STEPS_BETWEEN_WARNINGS = 100  # A training that is unstable stays so for a while.


class NotFiniteError(Exception):
    """A loss or gradient is not finite; the message names step and tower."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"at step {step} {what}")
        self.step = step
        self.what = what


class NeverFiniteError(NotFiniteError):
    """No later step can be expected to be finite either."""


class Results:
    """Collects the results of steps until they are read, and averages them.

    `progress` keeps the moving averages of losses and precision, and the number of
    steps skipped. A step that is not finite is an error, or skipped if `skips` is true.
    """

    def __init__(
        self, progress: Progress, tower_names: Sequence[str], *, skips: bool = False
    ) -> None:
        self._progress = progress
        self._skipped_in_a_row = 0
        self._tower_names = tuple(tower_names)
        self._skips = skips
        self._warning = ""
        self._warned = -math.inf
        self._pending: list[tuple[int, StepResult]] = []

    def add(self, step: int, result: StepResult) -> None:
        """Adds the result of one call, without waiting for its numbers.

        `step` is the last step of the call. The tensors of a call of several steps have
        a leading dimension of steps.
        """
        self._pending.append((step, result))

    def wait(self) -> None:
        """Waits for the devices, so that their time is not counted to what follows."""
        if self._pending:
            self._pending[-1][1].numbers.numpy()

    def drop(self) -> None:
        """Drops all results that were not read."""
        self._pending.clear()

    def read(self) -> dict[str, float]:
        """Checks and averages the results added since the last call.

        Returns the metrics of the newest step and the averages; empty if there is none.
        """
        newest: dict[str, float] = {}
        for last_step, result in self._pending:
            of_steps, losses = split_numbers(result.numbers.numpy(), result.metrics)
            first_step = last_step - (len(losses) - 1)
            for step, newest in enumerate(of_steps, first_step):
                self._count(step, newest, losses[step - first_step])
        if self._pending:
            averages = self._progress.loss_averages
            # A damaged checkpoint may hold names that no event file takes.
            known = [name for name in _AVERAGED if name in averages]
            newest |= {f"{name}/average": averages[name] for name in known}
        self._pending.clear()
        return newest

    def take_warning(self) -> str:
        """Returns, once, a warning about a sudden rise; empty if there was none."""
        warning, self._warning = self._warning, ""
        return warning

    def _count(self, step: int, newest: dict[str, float], losses: np.ndarray) -> None:
        if problem := self._not_finite(losses, newest["gradient_norm"]):
            if not self._skips:
                raise NotFiniteError(step, problem)
            say(f"SKIPPED the update of step {step}: {problem}.")
            self._progress.skipped_steps += 1
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row < MOST_SKIPPED_IN_A_ROW:
                return
            last = f"the updates of the last {MOST_SKIPPED_IN_A_ROW} steps"
            raise NeverFiniteError(step, f"{last} were all skipped")
        if newest.get("loss_scale", 1.0) < 1.0:
            raise NeverFiniteError(
                step,
                "the gradients are not finite in float16 however little the loss is "
                "scaled",
            )
        self._skipped_in_a_row = 0
        self._watch(step, newest["cross_entropy"])
        averages = self._progress.loss_averages
        for name in _AVERAGED:
            average = averages.get(name, newest[name])
            average += (1 - LOSS_AVERAGE_DECAY) * (newest[name] - average)
            averages[name] = average

    def _watch(self, step: int, loss: float) -> None:
        average = self._progress.loss_averages.get("cross_entropy", loss)
        is_quiet = step < self._warned + _STEPS_BETWEEN_WARNINGS
        if loss > 2 * average + _RISE and not is_quiet:
            self._warned = step
            self._warning = (
                f"UNSTABLE: at step {step} the cross entropy rose from "
                f"{loss_text(average)} to {loss_text(loss)}.\n"
                "A lower --learning_rate, or --clip_norm 3 or less, usually helps."
            )

    def _not_finite(self, losses: np.ndarray, gradient_norm: float) -> str:
        """Names a tower whose loss is not finite, or else the gradients' norm."""
        for tower in np.flatnonzero(~np.isfinite(losses)):
            name = self._tower_names[tower]
            return f"the loss of tower {tower} ({name}) is {losses[tower]}"
        if not np.isfinite(gradient_norm):
            return f"the norm of the averaged gradients is {gradient_norm}"
        return ""


def loss_text(loss: float) -> str:
    """Returns a loss for a line; one that explodes stays short."""
    return f"{loss:.2f}" if loss < 1000 else f"{loss:.0e}"
