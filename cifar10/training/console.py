"""The console of a training: its lines and its progress bar."""

from __future__ import annotations

from typing import Self

import rich.console
import rich.progress


class Console:
    """Prints lines, and below them a progress bar where the output is a terminal.

    Use it as a context manager. Only the chief shows anything.
    """

    def __init__(self, first_step: int, max_steps: int, *, shows: bool = True) -> None:
        self._shows = shows
        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed} of {task.total}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=self._console,
            disable=not (shows and self._console.is_terminal),
            transient=True,
        )
        self._task = self._progress.add_task(
            "train", total=max_steps, completed=first_step
        )

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self._shows:
            return
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
    """Returns the tutorial's line of a step.

    `rate` is examples a second and seconds a step; None if no step was timed.
    """
    if rate is None:
        return f"step {step}, loss = {loss:.2f} (not timed)"
    examples_per_sec, sec_per_batch = rate
    return (
        f"step {step}, loss = {loss:.2f} ({examples_per_sec:.1f} examples/sec; "
        f"{sec_per_batch:.3f} sec/batch)"
    )
