"""Standard output and error: full, closed or absent, and as wide as the terminal.

What they show cannot control a terminal, whoever has chosen its words.
"""

import contextlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from cifar10.errors import EXIT_USAGE, StoppedError, inert, reason
from cifar10.process import invocation

_CLEAR = "\x1b[K"  # The rest of the line, before or after `\r`.


def prepare(*, output_is_log: bool) -> None:
    """Makes both streams exist, and decides what happens when one fails.

    What stderr cannot write is lost, and so is a log on stdout; other output that fails
    ends the program. A closed descriptor would be given to the next file, and what
    libraries print would go into that. On a terminal, stderr breaks lines at words.
    """
    # Writing to a closed log then fails, and so does not go unnoticed.
    mode = os.O_RDONLY if output_is_log else os.O_RDWR
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # It takes the lowest number.
    # Python has no stream for a descriptor that was closed.
    stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # Unbuffered, Python loses without an error what a pipe does not take.
    if isinstance(getattr(stdout, "buffer", None), io.RawIOBase):
        stdout = open(stdout.fileno(), "w", 1, stdout.encoding, closefd=False)  # noqa: SIM115
    if isinstance(stdout, io.TextIOWrapper):  # Names of files need not be text.
        stdout.reconfigure(errors="surrogateescape")
    sys.stdout = cast("TextIO", _Output(stdout, lossy=output_is_log))
    wraps = stderr.isatty()
    sys.stderr = cast("TextIO", _Output(stderr, lossy=True, wraps=wraps))
    # Python 3.13 would colour tracebacks, by control sequences.
    os.environ.setdefault("PYTHON_COLORS", "0")


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Lets a library draw its progress bar, which moves the cursor."""
    _Output.is_inert = False
    try:
        yield
    finally:
        _Output.is_inert = True


class _Output:
    """A stream that fails once: with an error or, if it is `lossy`, a warning.

    If it `wraps`, no word is broken at the end of the terminal's lines. Control
    characters are written out, except in what other programs may read.
    """

    is_inert = True

    def __init__(self, stream: TextIO, *, lossy: bool, wraps: bool = False) -> None:
        self._stream = stream
        self._lossy = lossy
        self._is_for_people = lossy or stream.isatty()
        self._wraps = wraps
        self._failed = False

    def write(self, text: str) -> int:
        shown = text
        if self._is_for_people and self.is_inert and text.strip("\r") != _CLEAR:
            shown = inert(text)
        with self._writing():
            self._stream.write(_wrapped(shown) if self._wraps else shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._writing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: closed, or no such letter.
            if self._failed:
                return
            self._failed = True
            if isinstance(error, BrokenPipeError) and not self._lossy:
                raise
            problem = f"what it prints cannot be written: {reason(error)}."
            if not self._lossy:
                raise StoppedError(problem, EXIT_USAGE) from error
            loss = (
                f"{invocation.name()}: {problem}\nIt continues; these lines are lost."
            )
            print(loss, file=sys.stderr, flush=True)


def _wrapped(text: str) -> str:
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(
        width, break_long_words=False, break_on_hyphens=False
    )
    lines = text.split("\n")
    for number, line in enumerate(lines):
        # Commands are indented, to be copied; a bar's escape sequences have no width.
        if len(line) > width and line.isprintable() and not line.startswith(" "):
            lines[number] = wrapper.fill(line)
    return "\n".join(lines)
