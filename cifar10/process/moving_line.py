"""The moving line: a line on a terminal that shows the progress of a long task.

The line is drawn over itself and vanishes before any other output. It exists only while
a program of this package has both its output streams on a terminal; otherwise, as in a
file, a pipe, CI or a notebook, plain lines are printed now and then.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from cifar10.errors import format_duration, printable, say

SECONDS_BETWEEN_DRAWINGS = 0.2

# A function to call often, with a function that describes the progress.
Tick = Callable[[Callable[[], str]], None]


class MovingLine:
    """Draws and erases the line."""

    def __init__(self) -> None:
        self.stream: TextIO | None = None  # A terminal, unguarded; None draws nothing.
        self.is_free = True  # The cursor is at the beginning of a line.
        self._shown = 0  # Characters of the line that is on the screen.

    def show(self, text: str) -> None:
        """Draws the line, cut to the width of the terminal."""
        if self.is_free:
            # Other characters may be as wide as two.
            self._draw(printable(text).encode("ascii", "replace").decode())

    def erase(self) -> None:
        """Erases the line, if there is one."""
        if self._shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        if self.stream is None:
            return
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns or 80
            room = max(0, columns - 3)  # A terminal may add ^C.
            if len(text) > room:  # Rather without its last part than with half of it.
                text = text[:room].rpartition(", ")[0] or text[:room]
            # A window that has become narrower has broken the line into several.
            above = max(0, self._shown - 1) // columns
            up = f"\x1b[{above}A" if above else ""
            self._shown = len(text)  # Before an interruption may come.
            self.stream.write(f"\r{up}\x1b[J{text}")
            self.stream.flush()
        except (OSError, ValueError):  # The terminal is gone.
            self.stream, self._shown = None, 0


LINE = MovingLine()


@contextlib.contextmanager
def progress(first: float = 60.0) -> Iterator[Tick]:
    """Yields a `Tick` for a task of unknown duration.

    On a terminal, the moving line shows the description. Elsewhere it is printed after
    `first` seconds, and then every minute.
    """
    due = time.monotonic() + (0.0 if LINE.stream else first)

    def tick(describe: Callable[[], str]) -> None:
        nonlocal due
        if (now := time.monotonic()) < due:
            return
        if LINE.stream:
            due = now + SECONDS_BETWEEN_DRAWINGS
            LINE.show(describe())
        else:
            due = now + 60.0
            say(describe())

    try:
        yield tick
    finally:
        LINE.erase()


@contextlib.contextmanager
def counting(
    what: str, total: int, done: int = 0, *, first: float = 60.0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items done so far.

    `done` of all `total` things were done before. See `progress` for `first`.
    """
    began, before = time.monotonic(), done
    with progress(first) as tick:

        def advance(done: int) -> None:
            def describe() -> str:
                seconds = (time.monotonic() - began) / max(1, done - before)
                left = format_duration(seconds * (total - done))
                return f"{what}: {done:,} of {total:,}, {left} left"

            tick(describe)

        yield advance
