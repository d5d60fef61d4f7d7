"""How often histograms and images are written: never for more than 5 % of the time.

A fast GPU may take less time for a hundred steps than Python for one set of these.
Whether one is written changes nothing else: the step runs the same graph, on every
worker.
"""

import collections
import contextlib
import time
from collections.abc import Iterator

_MOST_SHARE = 0.05


class SummaryBudget:
    """Postpones sets of summaries where one every `period` steps is too many."""

    def __init__(self, period: int) -> None:
        self._began = time.perf_counter()
        self._costs: dict[int, float] = collections.defaultdict(float)  # By step.
        self._note = (
            f"NOTE: histograms and images every {period} steps would take more than "
            f"{_MOST_SHARE:.0%} of the time.\nThey are written less often."
        )
        self._has_postponed = False

    def allows(self) -> bool:
        """Returns whether one more set like the newest one stays within the share."""
        # Functions are traced in the first set, which counts as part of the start.
        costs = list(self._costs.values())[1:]
        elapsed = time.perf_counter() - self._began
        allowed = sum(costs + costs[-1:]) <= _MOST_SHARE * elapsed
        self._has_postponed |= not allowed
        return allowed

    @contextlib.contextmanager
    def spending(self, step: int) -> Iterator[None]:
        """Counts the block to the set of a step."""
        began = time.perf_counter()
        yield
        self._costs[step] += time.perf_counter() - began

    def take_note(self) -> str:
        """Returns, once, a note that sets are postponed; empty if none was."""
        if not self._has_postponed:
            return ""
        note, self._note = self._note, ""
        return note
