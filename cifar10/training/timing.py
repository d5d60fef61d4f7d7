"""How fast the steps run, and what limits them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

# Below this part of the time, waiting for images is not worth a change.
_MUCH_WAITING = 0.1


class _Window(NamedTuple):
    steps: int
    seconds: float
    waiting: float  # The part of `seconds` in which the towers had no images.


class Throughput:
    """Measures examples a second over a window, without what is not training."""

    def __init__(self, global_batch_size: int) -> None:
        self._windows: list[_Window] = []
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

        Returns examples a second and seconds a step; None where no step was counted.
        """
        elapsed = time.perf_counter() - self._began - self._left_out
        counted, waited = self._counted, self._waited
        self.restart()
        if not counted or elapsed <= 0:
            return None
        self._windows.append(_Window(counted, elapsed, waited))
        return counted * self._global_batch_size / elapsed, elapsed / counted

    def verdict(self) -> str:
        """Returns one line on what limits the steps; empty if none was counted."""
        if not self._windows:
            return ""
        _, seconds, waiting = map(sum, zip(*self._windows, strict=True))
        part = min(waiting / seconds, 1.0)
        if part >= _MUCH_WAITING:
            return (
                f"Input-bound: the towers waited {part:.0%} of the time for images. "
                "More CPU cores help, or on GPUs --input_device gpu."
            )
        return f"Compute-bound: the towers waited {part:.1%} of the time for images."

    def median_step(self) -> tuple[float, float] | None:
        """Returns the seconds of a step, and how long of it the towers had no images.

        They are of the median window, because the first ones of a run are slower; None
        if no step was counted.
        """
        steps = sorted(
            (w.seconds / w.steps, w.waiting / w.steps) for w in self._windows
        )
        return steps[len(steps) // 2] if steps else None
