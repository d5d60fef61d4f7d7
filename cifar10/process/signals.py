"""Handles signals: a program ends at once, and training after its current step."""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from cifar10.errors import STOP_SIGNALS
from cifar10.process import invocation

# A scheduler's signal may come twice: directly, and through a parent process.
_ONE_SIGNAL_SECONDS = 1.0
_SECONDS_TO_WRITE = 0.5


class StopSignals:
    """Ends the program on a signal, or records the signal so that training can save.

    Enter this context manager in the main thread; before that, signals keep their
    usual effect. From then on, a signal ends the program at once. After `defer` is
    called, a signal is only recorded, and a second one ends the program at once.

    Python runs signal handlers only between bytecodes of the main thread, so a handler
    would wait for a long TensorFlow call to return. This class receives signals in a
    separate thread, so a second signal ends the program even during such a call.
    """

    def __init__(self) -> None:
        self.clean_up: Callable[[], None] = _ignore  # Runs before an immediate end.
        self.requested: signal.Signals | None = None  # What requested the end.
        self._first_at = 0.0
        self._at_once = True
        self._before: dict[signal.Signals, Any] = {}

    def defer(self) -> None:
        """Only records signals from now on; the caller has to check `requested`."""
        self._at_once = False

    def reinstall(self) -> None:
        """Restores the handlers after TensorFlow has connected several machines.

        TensorFlow 2.21 replaces the SIGTERM handler when it connects machines.
        """
        for number in self._before:
            signal.signal(number, _ignore)

    def __enter__(self) -> Self:
        # Descriptor 2 is /dev/null while TensorFlow is imported.
        self._stderr = os.dup(2)
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._before = {one: signal.signal(one, _ignore) for one in stop_signals()}
        self._wakeup_before = signal.set_wakeup_fd(self._sending.fileno())
        threading.Thread(target=self._wait, name="signals", daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sending.close()  # The thread reads EOF and returns.
        os.close(self._stderr)

    def _wait(self) -> None:
        with self._receiving:
            while numbers := self._receiving.recv(1):
                if numbers[0] in STOP_SIGNALS:
                    self._note(signal.Signals(numbers[0]))

    def _note(self, number: signal.Signals) -> None:
        if self._at_once:
            self._exit(number, "interrupted before the first step; nothing is lost")
        now = time.monotonic()
        if number == self.requested and now < self._first_at + _ONE_SIGNAL_SECONDS:
            return
        if self.requested is not None:
            self._exit(number, "second signal: stopped at once, without a checkpoint")
        self.requested, self._first_at = number, now
        how = "saving after this step; a second signal exits at once"
        write_line(f"{number.name}: {how}.", self._stderr)

    def _exit(self, number: signal.Signals, how: str) -> None:
        write_line(f"{number.name}: {how}.", self._stderr)
        with contextlib.suppress(OSError):
            self.clean_up()
        os._exit(128 + number)  # The exit code that shells use.


def stop_signals() -> set[signal.Signals]:
    """Returns the signals to handle: all stop signals, but not SIGHUP under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return {*STOP_SIGNALS} - ({signal.SIGHUP} if ignored else set())


def _ignore(*unused: object) -> None:
    """Does nothing, but without a handler no signal would reach `set_wakeup_fd`."""


def write_line(text: str, descriptor: int = 2) -> None:
    """Writes the program's name and `text` to stderr, without waiting for a lock."""
    # Avoids sys.stderr, whose lock the main thread may hold, and a full pipe, which
    # would block this thread and delay a second signal.
    if select.select([], [descriptor], [], _SECONDS_TO_WRITE)[1]:
        # Erases a progress bar, or the ^C of Ctrl-C, from the terminal's line.
        clear = "\r\x1b[K" if os.isatty(descriptor) else ""
        line = f"{clear}{invocation.program_name()}: {text}\n"
        with contextlib.suppress(OSError):
            os.write(descriptor, line.encode())
