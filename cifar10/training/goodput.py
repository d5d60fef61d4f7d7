"""How the wall time of a run divides, restarts included.

Each line of `metrics.jsonl` has the seconds of each part so far. A process that resumes
a run continues from its last line; the time between processes is in no part.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from cifar10.errors import UsageError
from cifar10.run_directory import scores
from cifar10.training.console import duration, significant

# Time spent on steps, and lost with them; a summarized step counts as `summaries`.
_WORK = ("training", "input", "following", "summaries", "evaluation")
PARTS = (*_WORK, "start", "saving", "work lost")
_STEPPING = ("training", "input", "following")  # What decides how long steps take.
_LONGEST = 1e10  # Three centuries.


class Goodput:
    """Counts each moment to one part, from `began` on, when the program began.

    The start includes tracing; following is what the caller does between two steps.
    """

    def __init__(self, began: float | None = None) -> None:
        self._part = "start"
        self._since = time.perf_counter() if began is None else began
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps_not_timed = 0  # Those of a log that was lost.

    @property
    def part(self) -> str:
        """The part that the present moment counts to."""
        return self._part

    def enter(self, part: str) -> str:
        """Counts the time from now on to a part; returns the one before."""
        before, now = self._part, time.perf_counter()
        self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts the time of the block to a part."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def waited(self, seconds: float) -> None:
        """Counts some of the training's time to the input, without a clock."""
        self._seconds["training"] -= seconds
        self._seconds["input"] += seconds

    def stepping(self) -> float:
        """Returns the seconds of the steps: a clock that stands still in between."""
        self.enter(self._part)
        return sum(self._seconds[part] for part in _STEPPING)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part; together they are the run's wall time."""
        self.enter(self._part)
        return {part: round(of, 3) for part, of in self._seconds.items()}

    def go_back(self, log: Path, step: int, *, restarted: bool) -> None:
        """Counts as lost what the log or this process did beyond a step.

        A process that has just `restarted` continues from the log's last line.
        """
        lines = read(log)
        if restarted and not lines:
            self._steps_not_timed = step
        elif restarted:
            self._seconds = {p: s + lines[-1][1][p] for p, s in self._seconds.items()}
        kept = [seconds for at, seconds in lines if at <= step]
        for part in _WORK:
            lost = max(self._seconds[part] - (kept[-1][part] if kept else 0.0), 0.0)
            self._seconds[part] -= lost
            self._seconds["work lost"] += lost

    def summary(self, step: int, global_batch_size: int) -> str:
        """Returns a line on the run's time up to a step and its parts.

        The parts come largest first, then the rate that includes all of them.
        """
        seconds = self.seconds()
        total = max(sum(seconds.values()), 0.001)  # A clock may stand still.
        shares = sorted(((of / total, part) for part, of in seconds.items()))[::-1]
        parts = [f"{share:.0%} {part}" for share, part in shares if share >= 0.005]
        images = (step - self._steps_not_timed) * global_batch_size
        rate = f"{significant(images / total)} images/s of wall time"
        return f"Time:   {duration(total)}: {', '.join(parts)}; {rate}"


def read(log: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns the step and the seconds of each part, of the lines that have them."""
    found = []
    with contextlib.suppress(UsageError):  # A damaged log costs the figure alone.
        for entry in scores.read_lines(log):
            with contextlib.suppress(KeyError, TypeError):
                seconds = {part: entry["seconds"][part] for part in PARTS}
                possible = all(0 <= of < _LONGEST for of in seconds.values())
                if possible and isinstance(entry["step"], int):
                    found.append((entry["step"], seconds))
    return found
