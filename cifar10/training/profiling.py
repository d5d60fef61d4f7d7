"""A profile of some steps, for TensorBoard."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf


class StepProfile:
    """Profiles the steps that `--profile` names.

    Args:
        steps: The first and the last of them; None for no profile.
        directory: Where the profile is written; None in a process that writes nothing.
        max_steps: The last step of the run.
    """

    def __init__(
        self, steps: tuple[int, int] | None, directory: Path | None, max_steps: int
    ) -> None:
        # Without any, steps that never come.
        self._first, last = steps or (0, 0)
        self._last = min(last, max_steps)
        self._directory = directory
        self._running = False
        self._begun = False

    def meets(self, first: int, last: int) -> bool:
        """Whether some of the steps from `first` to `last` are to be profiled."""
        return first <= self._last and last >= self._first

    def starts_at(self, step: int) -> bool:
        """Whether the profile begins with this step."""
        return step == self._first

    def ends_at(self, step: int) -> bool:
        """Whether the profile ends with this step."""
        return self._running and step == self._last

    def start(self) -> None:
        """Begins to profile."""
        self._begun = True
        if self._directory is not None:
            tf.profiler.experimental.start(str(self._directory))
            self._running = True

    def stop(self) -> None:
        """Writes what has been profiled, if anything."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()

    def what_is_missing(self) -> str | None:
        """Says at the end that no step was profiled although some should have been."""
        if self._begun or not self._first:
            return None
        return (
            f"No profile was written: step {self._first} was not among the steps of "
            "this run."
        )
