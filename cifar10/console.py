"""What a training says on the console: its lines, its bar and its rate."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Self

import rich.console
import rich.progress


class Throughput:
    """Measures examples a second over a window, leaving out what is not training.

    Args:
        global_batch_size: Images per step.
    """

    def __init__(self, global_batch_size: int) -> None:
        self._global_batch_size = global_batch_size
        self._restart()

    def _restart(self) -> None:
        self._began = time.perf_counter()
        self._left_out = 0.0
        self._steps = 0

    def count_step(self) -> None:
        """Counts one step into the window."""
        self._steps += 1

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
        counted = self._steps
        self._restart()
        if not counted or elapsed <= 0:
            return None
        return counted * self._global_batch_size / elapsed, elapsed / counted


class Console:
    """Prints lines, and below them a progress bar where the output is a terminal.

    Use it as a context manager.

    Args:
        first_step: The step that the run goes on from.
        max_steps: The step that it ends at.
    """

    def __init__(self, first_step: int, max_steps: int) -> None:
        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed} of {task.total}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(
            "train", total=max_steps, completed=first_step
        )

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._console.is_terminal:
            self._console.print(text, markup=False)
        else:
            # Not through rich, which ends the program itself when a pipe is closed.
            print(text, flush=True)

    def advance(self, step: int) -> None:
        """Moves the bar to a step."""
        self._progress.update(self._task, completed=step)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._progress.stop()


def step_line(step: int, loss: float, rate: tuple[float, float] | None) -> str:
    """Returns the tutorial's line of one step.

    Args:
        step: The step.
        loss: Its total loss, the mean over all towers.
        rate: Examples a second and seconds a step, as `Throughput.take` gives them.
    """
    if rate is None:
        return f"step {step}, loss = {loss:.2f} (not timed)"
    examples_per_sec, sec_per_batch = rate
    return (
        f"step {step}, loss = {loss:.2f} ({examples_per_sec:.1f} examples/sec; "
        f"{sec_per_batch:.3f} sec/batch)"
    )
