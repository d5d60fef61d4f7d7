"""Measures where the time of a process goes, and how fast its steps are."""

import contextlib
import math
import time
from collections.abc import Iterator

# The first two are the time of steps.
_PARTS = ("training", "input", "start", "summaries", "evaluation", "saving")
# The largest share of time for summaries, and for checkpoints that nobody asked for.
MOST_SHARE = 0.05
# Waiting for images for less than this fraction of the time needs no advice.
_MUCH_WAITING = 0.1


class Share:
    """Limits an occasional task to 5 % of the time.

    After each execution, the task is not due for 20 times as long as it took. The first
    execution, which traces functions, belongs to the start.
    """

    def __init__(self) -> None:
        self.is_first = True
        self._next = -math.inf  # When it is due again, by `time.perf_counter`.

    def is_due(self) -> bool:
        """Returns whether enough time has passed since the block last ended."""
        return time.perf_counter() >= self._next

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Measures the duration of the block."""
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        self._next = now if self.is_first else now + (now - began) / MOST_SHARE
        self.is_first = False


class Timer:
    """Divides the wall time of a process into parts, and measures the rate of steps.

    The part "start" includes tracing; in "input", steps wait for images, and the rest
    of their time is "training". `metrics.jsonl` has the seconds of each part so far.
    """

    def __init__(self) -> None:
        self.part = "start"  # The part that is being timed.
        self.steps = 0  # In the parts "training" and "input" so far.
        self._since = time.perf_counter()
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._earlier = 0, 0.0  # Steps, and their seconds, when `rate` was called.

    def enter(self, part: str) -> None:
        """Counts time towards `part` from now on."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self.part, self._since = part, now

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Adds the duration of the block to the time of `part`."""
        before = self.part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part so far."""
        self.enter(self.part)
        return {part: round(seconds, 3) for part, seconds in self._seconds.items()}

    def step_seconds(self) -> float:
        """Returns the seconds that `steps` took, without tracing, saving and so on."""
        self.enter(self.part)
        return self._seconds["training"] + self._seconds["input"]

    def rate(self) -> float:
        """Returns the steps per second since the last call; NaN if there were none.

        Call it when all devices are idle.
        """
        steps, seconds = self._earlier
        self._earlier = self.steps, self.step_seconds()
        if self.steps == steps:
            return math.nan
        return (self.steps - steps) / (self._earlier[1] - seconds)

    def bottleneck(self) -> str:
        """Returns a line that names the bottleneck; empty if no step was timed."""
        if not self.steps:
            return ""
        part = self._seconds["input"] / self.step_seconds()
        waited = f"the towers waited {part:.0%} of the time for images."
        if part < _MUCH_WAITING:
            return f"Compute-bound: {waited}"
        return f"Input-bound: {waited}\nMore CPU cores help."
