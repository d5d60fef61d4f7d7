"""What a training's loop requires of parts that differ with several workers."""

from signal import Signals
from typing import Protocol

from cifar10.training.progress import Progress


class StopRequest(Protocol):
    """Requests the end of a training, as `signals.StopSignals` does."""

    @property
    def requested(self) -> Signals | None:
        """The signal to stop on after the current step, if any."""


class Scores(Protocol):
    """Scores the model between two steps, as `validation.Validation` does."""

    def begin(self, step: int) -> None:
        """Forgets the scores of later steps."""

    def is_due(self, step: int) -> bool:
        """Returns whether a step is to be scored."""

    def score(self, progress: Progress) -> tuple[str, dict[str, float]]:
        """Scores the step reached, and notes it there; returns a line and metrics."""
