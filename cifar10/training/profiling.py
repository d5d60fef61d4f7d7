"""A profile of some steps, for TensorBoard."""

from pathlib import Path

import tensorflow as tf

from cifar10.errors import DiskError, say
from cifar10.run_directory.event_files import writing


class StepProfile:
    """Profiles the steps from `first` to `last` into a folder of event files."""

    def __init__(self, first: int, last: int, directory: Path) -> None:
        self.first = first
        self.last = last
        self._directory = directory
        self._running = False
        self._begun = False

    def includes_any(self, first: int, last: int) -> bool:
        """Returns whether some of the steps from `first` to `last` are profiled."""
        return first <= self.last and last >= self.first

    def start(self) -> None:
        """Starts the profiler."""
        tf.profiler.experimental.start(str(self._directory))
        self._running = self._begun = True

    def stop(self) -> None:
        """Writes the profile, if the profiler is running."""
        if self._running:
            self._running = False
            try:
                with writing(self._directory):
                    tf.profiler.experimental.stop()
            except DiskError as error:
                say(f"{error.what} The profile is lost.")

    def warning(self) -> str:
        """Returns a warning, at the end, if none of the steps has run."""
        if self._begun:
            return ""
        return (
            f"No profile was written: step {self.first} was not among the steps of "
            "this run."
        )
