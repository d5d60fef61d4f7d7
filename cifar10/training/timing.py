"""How fast the steps run, where their time goes, and what limits it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

# Below this part of the time, waiting for images is not worth a change.
_MUCH_WAITING = 0.1
_REPEATS = 5


class Throughput:
    """Measures examples a second over a window, leaving out what is not training.

    Args:
        global_batch_size: Images per step.

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
        """Begins the window anew, without what it has counted."""
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
        """Leaves out the time of what runs inside: tracing, saving, summaries."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._left_out += time.perf_counter() - began

    def take(self) -> tuple[float, float] | None:
        """Ends the window and begins the next; call it when all devices are idle.

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

    def division(
        self, transfer: float, towers: float, with_average: float, rest: str
    ) -> str:
        """Returns how the time of a step divides, a line for each part.

        Args:
            transfer: Seconds to bring a batch to the towers' devices.
            towers: Seconds of the towers' forward and backward passes.
            with_average: Seconds of these and of averaging the gradients.
            rest: What to call the part that is not measured by itself.
        """
        # Of the middle window: the first ones of a run are slower.
        step, waiting = sorted(self._windows)[len(self._windows) // 2]
        averaging = max(with_average - towers, 0.0)
        parts = {
            "input: waiting for images": waiting,
            "towers: forward and backward": towers,
            "averaging": averaging,
            rest: max(step - waiting - towers - averaging, 0.0),
            "transfer, while the step before runs": transfer,
        }
        lines = [f"A step took {step * 1e3:.2f} ms:"]
        lines += [
            f"  {name:<38}{seconds * 1e3:9.2f} ms {seconds / step:6.1%}"
            for name, seconds in parts.items()
        ]
        return "\n".join(lines)


def seconds_of(action: Callable[[], object]) -> float:
    """Returns how long an action takes, in seconds: the median of a few.

    The first time, which may compile something, is not counted.
    """
    action()
    measured = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        action()
        measured.append(time.perf_counter() - began)
    return statistics.median(measured)
