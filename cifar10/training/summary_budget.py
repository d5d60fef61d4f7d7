"""How often histograms and images are written: never for more than 5 % of the time.

A set of them costs much the same on any device, but the steps between two do not: a GPU
may take less time for a hundred steps than Python for their set. Whether one is written
decides nothing else: the step runs the same graph, on every worker.
"""

import contextlib
import time
from collections.abc import Iterator

_MOST_SHARE = 0.05


class SummaryBudget:
    """Measures what sets of summaries cost, and postpones those for which it is early.

    `period` is how many steps apart they are unless they are postponed.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._began = time.perf_counter()
        self._newest_set: int | None = None
        self._is_first = True
        self._cost = 0.0  # Seconds of the newest set.
        self._spent = 0.0  # Seconds of all sets but the first.
        self._note: str | None = None

    def allows(self) -> bool:
        """Returns whether one more set like the newest one keeps to the share."""
        elapsed = time.perf_counter() - self._began
        allowed = self._spent + self._cost <= _MOST_SHARE * elapsed
        if not allowed and self._note is None:
            self._note = (
                f"NOTE: histograms and images every {self._period} steps would take "
                f"more than {_MOST_SHARE:.0%} of the time.\n"
                "They are written less often."
            )
        return allowed

    @contextlib.contextmanager
    def spending(self, step: int) -> Iterator[None]:
        """Counts the block to the set of a step.

        Not that of the first set, in which functions are traced: it is of the start.
        """
        if step != self._newest_set:
            self._is_first = self._newest_set is None
            self._newest_set, self._cost = step, 0.0
        began = time.perf_counter()
        yield
        if not self._is_first:
            seconds = time.perf_counter() - began
            self._cost += seconds
            self._spent += seconds

    def take_note(self) -> str:
        """Returns, once, that sets are postponed; empty if none was."""
        note = self._note or ""
        if note:
            self._note = ""
        return note
