"""How fast the steps run, and what limits them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

# Below this part of the time, waiting for images is not worth a change.
_MUCH_WAITING = 0.1


class Throughput:
    """Measures examples a second over a window, without what is not training.

    Attributes:
        steps: Steps of all windows that have ended.
        seconds: Their time.
        waiting: The part of it in which the towers had no images.
    """

    def __init__(self, global_batch_size: int) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.waiting = 0.0
        self._windows: list[tuple[float, float]] = []
        self._global_batch_size = global_batch_size
        self.restart()

    def restart(self) -> None:
        """Starts a new window and forgets the current one."""
        self._began = time.perf_counter()
        self._left_out = 0.0
        self._counted = 0
        self._waited = 0.0

    def count(self, steps: int = 1, waited: float = 0.0) -> None:
        """Counts steps into the window, and the seconds they waited for images."""
        self._counted += steps
        self._waited += waited

    @contextlib.contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leaves the time of the block, as of tracing or saving, out of the window."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._left_out += time.perf_counter() - began

    def take(self) -> tuple[float, float] | None:
        """Ends the window and starts the next; call it when all devices are idle.

        Returns:
            Examples a second and seconds a step, or None where no step was counted.
        """
        elapsed = time.perf_counter() - self._began - self._left_out
        counted, waited = self._counted, self._waited
        self.restart()
        if not counted or elapsed <= 0:
            return None
        self.steps += counted
        self.seconds += elapsed
        self.waiting += waited
        self._windows.append((elapsed / counted, waited / counted))
        return counted * self._global_batch_size / elapsed, elapsed / counted

    def verdict(self) -> str:
        """Returns one line on what limits the steps; empty if none was counted."""
        if not self.steps:
            return ""
        part = min(self.waiting / self.seconds, 1.0)
        if part >= _MUCH_WAITING:
            return (
                f"Input-bound: the towers waited {part:.0%} of the time for images. "
                "More CPU cores help, or on GPUs --input_device gpu."
            )
        return f"Compute-bound: the towers waited {part:.1%} of the time for images."

    def median_window(self) -> tuple[float, float]:
        """Returns the seconds of a step, and how long of it the towers had no images.

        They are those of the median window: the first ones of a run are slower.
        """
        return sorted(self._windows)[len(self._windows) // 2]
