"""Reports a step that hangs, and ends the run after `--hang_timeout` seconds."""

import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from cifar10.errors import EXIT_TRY_AGAIN
from cifar10.process.signals import write_line
from cifar10.training.loop import Loop

# A step is reported if it takes this many times the median, and at least this long.
_TIMES_MEDIAN = 20
_LEAST_SECONDS = 60.0
_TIMES_COMPILED = 10  # For evaluations, and steps that are compiled.
_SLOW = ("start", "evaluation")  # Parts that take longer.
_STEPS_OF_MEDIAN = 101
# Writing the report may hang as well, for example on the same disk as the step.
_SECONDS_TO_WRITE = 10.0
# The default of --hang_timeout where NCCL could wait for ever.
_SECONDS_OF_NCCL = 600.0
_ENDED = "\nEnded by --hang_timeout; the same command resumes."

# What a step waits for in these parts of the run's time.
_WAITS = {
    "input": "input batches",
    "summaries": "the disk of the summaries",
    "evaluation": "the evaluation of the previous step",
    "saving": "the disk of the checkpoints",
}
_ELSEWHERE = "its devices, a hook or the other workers"
_IN_NCCL = f"{_ELSEWHERE}; if NCCL hangs, set NCCL_P2P_DISABLE=1"


class Watchdog:
    """Watches the duration of each step from another thread.

    A step lasts from one call of `on_step` to the next. Steps that are compiled, or
    followed by an evaluation, may take longer. Time in suspension does not count.

    If a step hangs for `--hang_timeout` seconds, `end` ends the program with exit code
    75, so that a scheduler restarts the program.
    """

    def __init__(self, loop: Loop, end: Callable[[int], object] = os._exit) -> None:
        training, config = loop.training, loop.training.config
        mirrors = training.planner.replicas > 1 or training.workers.count > 1
        uses_nccl = mirrors and training.placement.suits_nccl
        default = _SECONDS_OF_NCCL if uses_nccl else math.inf
        hang_timeout = config.checkpoints.hang_timeout or default
        # `on_step` is called once per call of several steps.
        self._hang_timeout = training.steps_per_call * hang_timeout
        self._elsewhere = _IN_NCCL if uses_nccl else _ELSEWHERE
        self._loop = loop
        self._end = end
        self._step = 0
        self._ended: float | None = None  # When the last step ended.
        self._durations: deque[float] = deque(maxlen=_STEPS_OF_MEDIAN)
        self._over = threading.Event()
        watch = self._watch
        self._thread = threading.Thread(target=watch, name="watchdog", daemon=True)

    def on_step(self, step: int) -> None:
        """Records that a step, or a call of several steps, has ended."""
        now = time.monotonic()
        if self._ended is not None:
            self._durations.append(now - self._ended)
        self._step, self._ended = step, now

    def on_start(self, run: object) -> None:  # noqa: ARG002
        """Starts the watching thread, unless it is already running."""
        if self._thread.ident is None:
            self._thread.start()

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Stops watching."""
        self._over.set()
        self._thread.join(_SECONDS_TO_WRITE)

    def _watch(self) -> None:
        tick = min(1.0, self._hang_timeout / 10)
        doing, taken, is_reported = self._doing(), 0.0, False
        looked = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            taken += min(now - looked, 2 * tick)
            looked = now
            if doing != self._doing():
                doing, taken, is_reported = self._doing(), 0.0, False
            is_usual = self._ended and self._loop.timer.part not in _SLOW
            times = 1 if is_usual else _TIMES_COMPILED
            median = statistics.median(self._durations or [0.0])
            usual = max(_LEAST_SECONDS, _TIMES_MEDIAN * median)
            ends = taken > times * self._hang_timeout
            if ends or (taken > times * usual and not is_reported):
                is_reported = True
                self._report(taken, ends=ends)

    def _doing(self) -> tuple[float | None, bool]:
        """Returns a value that changes when a step or an evaluation begins or ends."""
        return self._ended, self._loop.timer.part == "evaluation"

    def _report(self, taken: float, *, ends: bool) -> None:
        line = (
            f"step {self._step + 1} has not ended after {taken:.0f} s.\n"
            f"It is waiting for {_WAITS.get(self._loop.timer.part, self._elsewhere)}."
            f"{_ENDED if ends else ''}"
        )
        writing = threading.Thread(target=self._tell, args=[line], daemon=True)
        writing.start()
        writing.join(_SECONDS_TO_WRITE)
        if ends:
            self._end(EXIT_TRY_AGAIN)

    def _tell(self, line: str) -> None:
        write_line(line)
        self._loop.progress.log_event(self._step + 1, "silence", line)
