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

    Use it as a context manager, in the main thread. Where it is not entered, as in a
    program that trains without the scripts, signals keep their usual effect.

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
        """The signal that requests the end; None if there was none."""
        return self._first

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Ends the program on a signal, even an earlier one: nothing is to be saved."""
        self._at_once = True
        try:
            if self._first is not None:
                _exit(self._first, _BEFORE)
            yield
        finally:
            self._at_once = False

    def reinstall(self) -> None:
        """Notes signals again after TensorFlow has connected several machines.

        TensorFlow 2.21 installs its own SIGTERM handler then.
        """
        for number in self._before:
            signal.signal(number, _ignore)

    def __enter__(self) -> Self:
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._before = {
            number: signal.signal(number, _ignore) for number in STOP_SIGNALS
        }
        self._wakeup_before = signal.set_wakeup_fd(self._sending.fileno())
        threading.Thread(target=self._wait, name="signals", daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sending.close()  # The thread reads the end of the file and returns.

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
            _exit(number, "second signal: stopped at once, without a checkpoint")
        self._first, self._first_at = number, now
        _print_to_stderr(
            f"{number.name}: ending this step, then saving; a second signal exits now"
        )


def _ignore(*unused: object) -> None:
    """Does nothing: without a handler a signal would not reach `set_wakeup_fd`."""


def _exit(number: signal.Signals, how: str) -> None:
    _print_to_stderr(f"{number.name}: {how}")
    os._exit(128 + number)  # As shells count.


def _print_to_stderr(text: str) -> None:
    # Not through sys.stderr, whose lock the main thread may hold.
    with contextlib.suppress(OSError):
        os.write(2, f"{os.path.basename(sys.argv[0])}: {text}.\n".encode())  # noqa: PTH119
