"""A rival in a process of its own, asked over a pipe."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

# Longer than anything that works: compiling, or filling the tutorial's queue.
PATIENCE_SECONDS = 600.0
_CLOSING_SECONDS = 20.0
_LONGEST_MESSAGE = 160


class RivalError(Exception):
    """A rival cannot be measured; the message is one line that says why."""


class HasProblem(Protocol):
    """A result that can say why there is none."""

    problem: str


@contextlib.contextmanager
def noting_problems(result: HasProblem) -> Iterator[None]:
    """Gives a rival's problem to its result, and lets the others go on."""
    try:
        yield
    except RivalError as error:
        result.problem = str(error)


def tell(progress: str) -> None:
    """Shows how far a measurement is, beside its result."""
    print(progress, file=sys.stderr, flush=True)


class Child:
    """One rival, started at once; use it as a context manager, or call `close`.

    Args:
        module: The rival's module, whose `start` runs in the new process.
        options: Arguments of `start`.
        patience: Seconds that an answer may take.
        extra: The extra of this project that brings what the rival needs.

    Attributes:
        precision: The type that the rival computes in.

    Raises:
        RivalError: It does not start.
    """

    def __init__(
        self,
        module: str,
        options: dict[str, Any],
        patience: float = PATIENCE_SECONDS,
        extra: str = "peers",
    ) -> None:
        self._patience = patience
        with tempfile.NamedTemporaryFile(prefix="benchmark-", delete=False) as log:
            self._log = Path(log.name)
        # A fresh interpreter: a forked one would inherit threads and settings.
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other_end, module, options, self._log, extra)
        )
        self._process.start()
        other_end.close()
        try:
            self.precision: str = self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: object) -> Any:
        """Calls a method of the rival and returns what it returns.

        Raises:
            RivalError: The rival raises, dies or does not answer.
        """
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise RivalError(self._last_words()) from None
        return self._receive()

    def close(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        self._pipe.close()
        self._process.join(_CLOSING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _receive(self) -> Any:
        if not self._pipe.poll(self._patience):
            self._process.kill()
            raise RivalError(f"no answer within {self._patience:.0f} seconds")
        try:
            problem, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RivalError(self._last_words()) from None
        if problem:
            raise RivalError(problem)
        return answer

    def _last_words(self) -> str:
        """Returns how the process ended, with the last line it wrote."""
        self._process.join(_CLOSING_SECONDS)
        code = self._process.exitcode
        end = f"signal {-code}" if code and code < 0 else f"exit code {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return _one_line(f"its process ended with {end} {' '.join(written[-1:])}")


def _serve(pipe: Connection, module: str, options: dict, log: Path, extra: str) -> None:
    """Runs a rival in the new process, until its parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair.
    _write_to(log)
    try:
        rival = importlib.import_module(module).start(**options)
    except Exception as error:  # noqa: BLE001 - told to the parent.
        traceback.print_exc()
        pipe.send((_problem(error, extra), None))
        return
    pipe.send(("", rival.precision))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = "", getattr(rival, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - told to the parent.
            traceback.print_exc()
            answer = _problem(error, extra), None
        pipe.send(answer)
    if hasattr(rival, "close"):
        rival.close()


def _write_to(log: Path) -> None:
    """Sends what this process writes to a file, so that it mixes with no table."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _problem(error: Exception, extra: str) -> str:
    """Says in one line what stopped a rival."""
    if isinstance(error, ModuleNotFoundError) and _is_foreign(error.name or ""):
        return f"not installed ({error.name}): pip install -e .[{extra}]"
    first_line = str(error).strip().partition("\n")[0]
    return _one_line(f"{type(error).__name__}: {first_line}")


def _is_foreign(module: str) -> bool:
    """Tells whether a module is none of ours."""
    return module.partition(".")[0] not in ("benchmarks", "cifar10")


def _one_line(text: str) -> str:
    """Returns text that fits into a table's cell."""
    words = " ".join(text.split()).replace("|", "/")
    if len(words) > _LONGEST_MESSAGE:
        return f"{words[:_LONGEST_MESSAGE]} ..."
    return words
