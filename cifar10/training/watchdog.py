"""Reports a step that hangs, and ends the run after `--hang_timeout` seconds."""

import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from cifar10.errors import EXIT_TRY_AGAIN
from cifar10.process.signals import write_line
from cifar10.training.loop import Loop

# A step is reported if it takes this many times the median, and at least this long.
_TIMES_MEDIAN = 20
_LEAST_SECONDS = 60.0
_TIMES_COMPILED = 10  # For evaluations, and steps that are compiled.
_SLOW = ("start", "evaluation")  # Parts that take longer.
_STEPS_OF_MEDIAN = 101
# A step that takes this long may be waiting for a machine that is gone.
_SECONDS_TO_LIMIT_SILENCE = 5.0
# Writing the report may hang as well, for example on the same disk as the step.
_SECONDS_TO_WRITE = 10.0
# The wait for the thread at the end of a run. Asking other workers may take longer.
_SECONDS_TO_STOP = 1.0
_ENDED = "\nEnded by --hang_timeout; the same command resumes."

_PACKAGE = Path(__file__).parents[1]
# What a step waits for in these parts of the run's time. In other parts a step waits
# for its devices or the other workers.
_WAITS = {"input": "input batches", "saving": "the disk of the checkpoints"}


class Watchdog:
    """A hook that watches the duration of each step from another thread.

    A step lasts from one call of `on_step` to the next. Steps that are compiled, or
    followed by an evaluation, may take longer. Time during which the whole process is
    suspended does not count.

    If a step hangs for `--hang_timeout` seconds, `end` ends the program with exit code
    75, so that a scheduler restarts the program.

    Warnings name what the step waits for: the hook that is being called, the input, a
    disk, or else the devices and the other workers.
    """

    def __init__(self, loop: Loop, end: Callable[[int], object] = os._exit) -> None:
        training = loop.training
        config, workers = training.config, training.workers
        devices = ", ".join(training.towers.devices)
        # `on_step` is called once per call of several steps.
        steps = config.steps_per_call
        self._hang_timeout = steps * (config.checkpoints.hang_timeout or math.inf)
        self._devices = devices if workers.count == 1 else f"{devices} or the network"
        self._loop = loop
        self._workers = workers
        self._end = end
        self._step = 0
        self._ended: float | None = None  # When the last step ended.
        self._durations: deque[float] = deque(maxlen=_STEPS_OF_MEDIAN)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def on_step(self, step: int) -> None:
        """Records that a step, or a call of several steps, has ended."""
        now = time.monotonic()
        if self._ended is not None:
            self._durations.append(now - self._ended)
        self._step, self._ended = step, now

    def on_start(self, run: object) -> None:  # noqa: ARG002
        """Starts watching the calling thread, unless it is watched already."""
        if self._thread is None:
            self._watched = threading.get_ident()
            self._thread = threading.Thread(
                target=self._watch, name="watchdog", daemon=True
            )
            self._thread.start()

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Stops watching, without waiting for answers from the other workers."""
        self._over.set()
        if self._thread:
            self._thread.join(_SECONDS_TO_STOP)

    def _watch(self) -> None:
        tick = min(1.0, self._hang_timeout / 10)
        doing, taken, is_limited, is_reported = self._doing(), 0.0, False, False
        looked = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            taken += min(now - looked, 2 * tick)
            looked = now
            if doing != self._doing():
                doing, taken, is_limited, is_reported = self._doing(), 0.0, False, False
            if taken > _SECONDS_TO_LIMIT_SILENCE and not is_limited:
                is_limited = True
                self._workers.limit_silence()
            is_usual = self._ended and self._loop.goodput.part not in _SLOW
            times = 1 if is_usual else _TIMES_COMPILED
            median = statistics.median(self._durations or [0.0])
            usual = max(_LEAST_SECONDS, _TIMES_MEDIAN * median)
            ends = taken > times * self._hang_timeout
            if ends or (taken > times * usual and not is_reported):
                is_reported = True
                self._report(taken, doing, ends=ends)

    def _doing(self) -> tuple[float | None, bool]:
        """Returns a value that changes when a step or an evaluation begins or ends."""
        return self._ended, self._loop.goodput.part == "evaluation"

    def _report(
        self, taken: float, doing: tuple[float | None, bool], *, ends: bool
    ) -> None:
        waits, place = self._waits_for()
        others = self._workers.ask_who_hangs(self._step, waits)
        if self._doing() != doing or self._over.is_set():
            return  # The step has ended while other workers were asked.
        _, evaluates = doing
        what = f"step {self._step + 1}"
        if evaluates:
            what = f"the evaluation after step {self._step}"
        line = (
            f"{what} has not ended after {taken:.0f} s.\n"
            f"It waits {place} for {waits or others or self._devices}."
            f"{_ENDED if ends else ''}"
        )
        writing = threading.Thread(target=write_line, args=[line], daemon=True)
        writing.start()
        writing.join(_SECONDS_TO_WRITE)
        if ends:
            self._end(EXIT_TRY_AGAIN)

    def _waits_for(self) -> tuple[str, str]:
        """Returns what the thread waits for ("" if unknown), and where in the code."""
        loop = self._loop
        waits = loop.hooks.waits_for or _WAITS.get(loop.goodput.part, "")
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001 - documented.
        while frame:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(_PACKAGE):
                name = path.relative_to(_PACKAGE).as_posix()
                return waits, f"in {_PACKAGE.name}/{name}:{frame.f_lineno}"
            frame = frame.f_back
        return waits, f"outside of {_PACKAGE.name}"
