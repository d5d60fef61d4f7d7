"""Reports the progress of downloads and preparations."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# Seconds between reports: a terminal's line is overwritten, but a log grows.
_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0


@contextlib.contextmanager
def progress(
    what: str, unit: str, total: int, start: int, *, unit_size: int = 1
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the amount done, and reports progress on stderr.

    A line begins with `what`, the task. `total` is the whole amount, of which `start`
    was done before. Lines show amounts in a `unit`, such as "MB", of size `unit_size`.
    """

    def shown(amount: float) -> str:
        return f"{amount / unit_size:,.{0 if unit_size == 1 else 1}f}"

    is_terminal = sys.stderr.isatty()
    pause = _TERMINAL_SECONDS if is_terminal else _LOG_SECONDS
    began = printed = time.monotonic()

    def report(done: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed < pause:
            return
        printed = now
        rate = max(done - start, 1) / max(now - began, 1e-3)
        line = (
            f"{what}: {shown(done)} of {shown(total)} {unit}, {shown(rate)} {unit}/s, "
            f"{(total - done) / rate:,.0f} s left"
        )
        # The escape sequence clears what is left of a longer line.
        end = "\x1b[K\r" if is_terminal else "\n"
        print(line, end=end, file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if is_terminal and printed > began:
            print(file=sys.stderr)
