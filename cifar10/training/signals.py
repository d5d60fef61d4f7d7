"""Signals that end a training: the first after the step, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

from cifar10.errors import STOP_SIGNALS

_BEFORE = "stopped before this session's first step"

# Some schedulers signal a process and those that pass signals on to it.
_ONE_SIGNAL_SECONDS = 1.0


class StopSignals:
    """Notes signals, so that a training can end in good order.

    Use it as a context manager, in the main thread. Outside of it, as where a program
    trains without the scripts, no signal is ever noted.

    Python runs its handlers between two bytecodes of the main thread, so a signal would
    wait for a long TensorFlow call to return. Here a thread waits for signals, and so
    the second one ends the program even then.
    """

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._first_at = 0.0
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that asks for the end; None if there was none."""
        return self._first

    @contextlib.contextmanager
    def at_once(self, *, earlier: bool = False) -> Iterator[None]:
        """Lets a signal end the program at once, while there is nothing to keep.

        Args:
            earlier: Whether one that was noted before does so too.
        """
        self._at_once = True
        try:
            if earlier and self._first is not None:
                _exit(self._first, _BEFORE)
            yield
        finally:
            self._at_once = False

    def take_back(self) -> None:
        """Notes signals again after TensorFlow has connected several machines.

        It takes SIGTERM then, to tell of a preemption nobody asks it about (2.21).
        """
        for one in self._before:
            signal.signal(one, _ignore)

    def __enter__(self) -> Self:
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._before = {one: signal.signal(one, _ignore) for one in STOP_SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._sending.fileno())
        threading.Thread(target=self._wait, name="signals", daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._sending.close()  # The thread reads the end and returns.

    def _wait(self) -> None:
        with self._receiving:
            while numbers := self._receiving.recv(1):
                if numbers[0] in STOP_SIGNALS:
                    self._note(signal.Signals(numbers[0]))

    def _note(self, number: signal.Signals) -> None:
        if self._at_once:
            _exit(number, _BEFORE)
        now = time.monotonic()
        if number == self._first and now < self._first_at + _ONE_SIGNAL_SECONDS:
            return
        if self._first is not None:
            _exit(number, "the second signal: stopped at once, without a checkpoint")
        self._first, self._first_at = number, now
        _say(f"{number.name}: ending this step, then saving; a second signal exits now")


def exit_code(number: signal.Signals) -> int:
    """Returns the exit code of a program that a signal has ended, as shells count."""
    return 128 + number


def _ignore(*unused: object) -> None:
    """Stands where a handler must stand for the signal to be noted at all."""


def _exit(number: signal.Signals, how: str) -> None:
    _say(f"{number.name}: {how}")
    os._exit(exit_code(number))


def _say(text: str) -> None:
    # Not through sys.stderr, whose lock the main thread may hold.
    with contextlib.suppress(OSError):
        os.write(2, f"{os.path.basename(sys.argv[0])}: {text}.\n".encode())  # noqa: PTH119
