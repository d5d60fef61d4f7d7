"""Measures where the time of a run goes, and how fast its steps are."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar10.errors import UsageError
from cifar10.run_directory import logs

# The parts that are lost if their steps are lost.
_WORK = ("training", "input", "following", "summaries", "evaluation")
PARTS = (*_WORK, "start", "saving", "work lost")
_STEPPING = ("training", "input", "following")  # The parts of a step.
_LONGEST = 1e10  # Seconds: three centuries.

# Waiting for images for less than this fraction of the time needs no advice.
_MUCH_WAITING = 0.1
HOUR = 3600.0


class Goodput:
    """Divides the wall time of a run into parts, such as training and saving.

    Time is counted from `began`, the start of the program. The part "start" includes
    tracing; "following" is the time of hooks between two steps. Each line of
    `metrics.jsonl` has the seconds of every part so far. A process that resumes a run
    adds to the last line's seconds; time between two processes is not counted.
    """

    def __init__(self, began: float | None = None) -> None:
        self._part = "start"
        self._since = time.perf_counter() if began is None else began
        self._is_new = True  # Whether `go_back` was not called yet.
        self._untimed = 0  # Steps of earlier processes after their last log line.
        self._seconds = dict.fromkeys(PARTS, 0.0)

    @property
    def part(self) -> str:
        """The part towards which time is being counted, such as "training"."""
        return self._part

    def enter(self, part: str) -> str:
        """Counts time towards `part` from now on; returns the previous part."""
        before, now = self._part, time.perf_counter()
        self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Adds the duration of the block to the time of `part`."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def stepping(self) -> tuple[float, float]:
        """Returns the seconds in steps, and how many of them were spent awaiting input.

        Time outside of steps, for example for tracing or saving, does not count.
        """
        self.enter(self._part)
        steps = sum(self._seconds[part] for part in _STEPPING)
        return steps, self._seconds["input"]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part, whose sum is the run's wall time."""
        self.enter(self._part)
        return {part: round(of, 3) for part, of in self._seconds.items()}

    def go_back(self, log: Path, step: int) -> None:
        """Moves the time spent on work after `step` to the part `work lost`.

        The first call starts by adding to the parts what earlier processes logged.
        """
        lines = read_seconds(log)
        if self._is_new and lines:
            last, seconds = lines[-1]
            self._seconds = {p: s + seconds[p] for p, s in self._seconds.items()}
            self._untimed = max(step - last, 0)
        elif self._is_new:
            self._untimed = step
        self._is_new = False
        kept = [seconds for at, seconds in lines if at <= step]
        for part in _WORK:
            lost = max(self._seconds[part] - (kept[-1][part] if kept else 0.0), 0.0)
            self._seconds[part] -= lost
            self._seconds["work lost"] += lost

    def summary(self, step: int, global_batch_size: int) -> str:
        """Describes the run's wall time: its length, its largest parts, and images/s.

        The rate in images/s is the average over the wall time up to `step`.
        """
        seconds = self.seconds()
        total = max(sum(seconds.values()), 0.001)  # Never divide by zero.
        shares = sorted(((of / total, part) for part, of in seconds.items()))[::-1]
        parts = [f"{share:.0%} {part}" for share, part in shares if share >= 0.005]
        images = (step - self._untimed) * global_batch_size
        rate = f"{format_number(images / total)} images/s of wall time"
        return f"Time:   {format_duration(total)}: {', '.join(parts)}; {rate}"


def read_seconds(log: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns (step, seconds by part) from those lines of a log that record both."""
    found = []
    with contextlib.suppress(UsageError):  # A damaged log ends no run.
        for entry in logs.read_lines(log):
            with contextlib.suppress(KeyError, TypeError):
                seconds = {part: entry["seconds"][part] for part in PARTS}
                possible = all(0 <= of < _LONGEST for of in seconds.values())
                if possible and isinstance(entry["step"], int):
                    found.append((entry["step"], seconds))
    return found


class TimedSteps(NamedTuple):
    """How long some steps took."""

    steps: int
    seconds: float
    waiting: float  # Those of `seconds` in which the towers had no images.

    def bottleneck(self) -> str:
        """Returns a line on what limits the speed; empty if no step was timed."""
        if not self.seconds:
            return ""
        part = self.waiting / self.seconds
        amount = f"{part:.0%}" if part >= 0.01 else "less than 1%"
        waited = f"the towers waited {amount} of the time for images."
        if part < _MUCH_WAITING:
            return f"Compute-bound: {waited}"
        return (
            f"Input-bound: {waited}\n"
            "More CPU cores help; on GPUs, --input_device gpu also helps."
        )


class Throughput:
    """Measures examples per second over a window of steps."""

    def __init__(self, global_batch_size: int, goodput: Goodput) -> None:
        self._earlier = TimedSteps(0, 0.0, 0.0)  # The steps of earlier windows.
        self._global_batch_size = global_batch_size
        self._goodput = goodput
        self.restart()

    def restart(self) -> None:
        """Discards the current window and starts a new one."""
        self._began = self._goodput.stepping()
        self._counted = 0

    def count(self, steps: int = 1) -> None:
        """Counts steps in the current window."""
        self._counted += steps

    def take(self) -> float:
        """Returns the window's examples per second, and starts the next window.

        Call it when all devices are idle. Returns NaN if no step was counted.
        """
        before, self._earlier = self._earlier, self.timed()
        self.restart()
        steps, seconds, _ = np.subtract(self._earlier, before)
        rate = steps * self._global_batch_size / seconds if seconds > 0 else math.nan
        return float(rate)

    def timed(self) -> TimedSteps:
        """Returns the number and duration of the steps in all windows so far."""
        if not self._counted:
            return self._earlier
        seconds, waiting = np.subtract(self._goodput.stepping(), self._began)
        return TimedSteps(*np.add(self._earlier, (self._counted, seconds, waiting)))


def format_duration(seconds: float) -> str:
    """Formats a duration in the largest unit in which it is at least 1.5."""
    for unit, size in (("days", 24 * HOUR), ("hours", HOUR), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            return f"{format_number(seconds / size, 2)} {unit}"
    return f"{format_number(seconds, 2)} seconds"


def format_number(value: float, digits: int = 3) -> str:
    """Formats a number, rounded to `digits` significant digits."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"
