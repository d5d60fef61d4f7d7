"""Runs rivals in separate processes, which are checked first and then take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import signal
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from benchmarks.parity import Check, complaint
from cifar10.errors import UsageError

# Longer than anything that works: compiling, or filling the tutorial's queue.
PATIENCE_SECONDS = 600.0
_CLOSING_SECONDS = 20.0
_LONGEST_MESSAGE = 160


@dataclasses.dataclass(frozen=True)
class Row:
    """One rival, which is one row of the table.

    Attributes:
        name: For people.
        module: The full name of the rival's module.
        options: Arguments of the module's `start`.
        details: What else distinguishes the row, for people and for JSON.
    """

    name: str
    module: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name with the details, which `--only` searches."""
        return ", ".join([self.name, *map(str, self.details.values())])


@dataclasses.dataclass
class Result:
    """What was measured of a row.

    Attributes:
        row: The row.
        precision: The type that the rival computes in.
        problem: Why it was not measured, in one line; empty if it was.
        checks: How far it is from the reference.
        facts: Figures that are the same in all rounds.
        rounds: The figures of each round by name.
    """

    row: Row
    precision: str = ""
    problem: str = ""
    checks: list[Check] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether there are figures to show."""
        return bool(self.rounds) and not self.problem

    def figures(self, name: str) -> list[Any]:
        """Returns one figure of every round."""
        return [figures[name] for figures in self.rounds]

    def median(self, name: str) -> float:
        """Returns the median of a figure over the rounds."""
        return statistics.median(self.figures(name))


def ratio(name: str, result: Result, peer: Result | None) -> float | None:
    """Returns the median over the rounds of a result's figure over a peer's.

    Both figures of a pair are of one round, so that a drift of the machine cancels out.
    None where one of them was not measured.
    """
    if not peer or not peer.is_measured or not result.is_measured:
        return None
    pairs = zip(result.figures(name), peer.figures(name), strict=True)
    return statistics.median(own / other for own, other in pairs)


class Titled(Protocol):
    """A row of a table."""

    @property
    def title(self) -> str:
        """What `--only` searches."""


_Row = TypeVar("_Row", bound=Titled)


def select_rows(rows: Sequence[_Row], wanted: Sequence[str]) -> list[_Row]:
    """Returns the rows whose title contains one of some words; all if there are none.

    Raises:
        UsageError: Some words are in no title.
    """
    for words in wanted:
        if not any(words.lower() in row.title.lower() for row in rows):
            titles = "\n  ".join(row.title for row in rows)
            raise UsageError(
                f"--only {words!r}: no row is called so. A part of one of these "
                f"titles is enough:\n  {titles}"
            )
    return [
        row
        for row in rows
        if not wanted or any(words.lower() in row.title.lower() for words in wanted)
    ]


def show_progress(progress: str) -> None:
    """Shows how far a measurement is, beside its result."""
    print(progress, file=sys.stderr, flush=True)


def measure_in_turn(
    rows: Sequence[Row],
    rounds: int,
    *,
    prepare: Callable[[Result, Child], object],
    measure: Callable[[Result, Child, int], dict[str, Any]],
    patience: float = PATIENCE_SECONDS,
) -> list[Result]:
    """Starts the rivals, checks them, and measures them in turn, round by round.

    A rival with a problem is left out from then on, and the others go on. Each figure
    is shown as soon as it is measured, so that little is lost with a long run's end.

    Args:
        rows: The rivals.
        rounds: Measurements of each.
        prepare: Adds a started rival's checks and facts to its result.
        measure: Returns a rival's figures in the round of a number, from 0.
        patience: Seconds that an answer may take.

    Returns:
        One result for each row; those that could not be measured say why.
    """
    results = [Result(row) for row in rows]
    children: list[tuple[Result, Child]] = []
    with contextlib.ExitStack() as stack:
        for result in results:
            row = result.row
            try:
                child = Child(row.module, row.options, patience)
                children.append(
                    (result, stack.enter_context(contextlib.closing(child)))
                )
                result.precision = child.precision
                prepare(result, child)
                result.problem = complaint(result.checks)
            except RivalError as error:
                result.problem = str(error)
            show_progress(f"{row.title}: {result.problem or 'ready'}")
        for number in range(rounds):
            for result, child in children:
                if result.problem:
                    continue
                try:
                    figures = measure(result, child, number)
                    result.rounds.append(figures)
                    said = ", ".join(f"{name} {one}" for name, one in figures.items())
                except RivalError as error:
                    said = result.problem = str(error)
                show_progress(f"{result.row.title}, {number + 1} of {rounds}: {said}")
    return results


class RivalError(Exception):
    """A rival cannot be measured; the message is one line that says why."""


class Child:
    """The process of a rival, which runs from construction until `close` is called.

    Args:
        module: The rival's module, whose `start` runs in the new process.
        options: Arguments of `start`.
        patience: Seconds that an answer may take.

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
    ) -> None:
        self._patience = patience
        # A fresh interpreter: a forked one would inherit threads and settings.
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other_end, module, options)
        )
        self._process.start()
        other_end.close()
        try:
            self.precision: str = self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: object) -> Any:
        """Calls a method of the rival and returns its result.

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
        """Returns how the process ended."""
        self._process.join(_CLOSING_SECONDS)
        code = self._process.exitcode
        end = f"signal {-code}" if code and code < 0 else f"exit code {code}"
        return f"its process ended with {end}; what it wrote is above"


def _serve(pipe: Connection, module: str, options: dict) -> None:
    """Runs a rival in the new process, until its parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair.
    # Beside the parent's progress, and not into its table.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    rival: Any = None
    method, arguments = "start", ()
    while True:
        try:
            if rival is None:
                rival = importlib.import_module(module).start(**options)
                answer = rival.precision
            else:
                answer = getattr(rival, method)(*arguments)
            pipe.send(("", answer))
        except Exception as error:  # noqa: BLE001 - told to the parent.
            traceback.print_exc()
            pipe.send((_describe(error, module), None))
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
    if hasattr(rival, "close"):
        rival.close()


def _describe(error: Exception, module: str) -> str:
    """Says in one line what stopped a rival."""
    missing = getattr(error, "name", None) or ""
    is_ours = missing.partition(".")[0] in ("benchmarks", "cifar10")
    if isinstance(error, ModuleNotFoundError) and not is_ours:
        extra = "rosetta" if ".rosetta." in module else "peers"
        return f"not installed ({missing}): pip install -e .[{extra}]"
    first_line = str(error).strip().partition("\n")[0].replace("|", "/")
    return f"{type(error).__name__}: {first_line[:_LONGEST_MESSAGE]}"
