"""Signals that end a program: at once, or a training after its step."""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from cifar10.errors import STOP_SIGNALS
from cifar10.process import invocation

_AT_ONCE = "interrupted; there was nothing to save yet"

# In a terminal there may be a progress bar in the line, or the ^C of Ctrl-C.
CLEAR_LINE = "\r\x1b[K"

# Some schedulers signal a process, and a parent that passes the signal on to it.
_ONE_SIGNAL_SECONDS = 1.0
_MOST_MILLISECONDS = 500  # To wait for a reader of stderr that has fallen behind.


class StopSignals:
    """Ends the program on a signal, or notes it so that a training can save its step.

    A signal ends the program at once until `defer` is called. Use it as a context
    manager, in the main thread. Where it is not entered, as in a program that trains
    without the scripts, signals keep their usual effect.

    Python runs its handlers between two bytecodes of the main thread, so a signal would
    wait for a long TensorFlow call to return. Here a thread waits for signals, so a
    second signal ends the program even during such a call.

    Attributes:
        clean_up: Called when the program is ended at once.
        requested: The signal that requests the end; None if there was none.
    """

    def __init__(self) -> None:
        self.clean_up: Callable[[], None] = _ignore
        self.requested: signal.Signals | None = None
        self._first_at = 0.0
        self._at_once = True
        self._before: dict[signal.Signals, Any] = {}

    def defer(self) -> None:
        """Only notes signals from now on, for a caller that looks at `requested`."""
        self._at_once = False

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Ends the program on a signal, even an earlier one: nothing needs saving."""
        before, self._at_once = self._at_once, True
        try:
            if self.requested is not None:
                self._exit(self.requested, _AT_ONCE)
            yield
        finally:
            self._at_once = before

    def reinstall(self) -> None:
        """Notes signals again after TensorFlow has connected several machines.

        TensorFlow 2.21 installs its own SIGTERM handler when it does so.
        """
        for number in self._before:
            signal.signal(number, _ignore)

    def __enter__(self) -> Self:
        # While TensorFlow is imported, descriptor 2 is another file.
        self._stderr = os.dup(2)
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._before = {
            number: signal.signal(number, _ignore) for number in stop_signals()
        }
        self._wakeup_before = signal.set_wakeup_fd(self._sending.fileno())
        threading.Thread(target=self._wait, name="signals", daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sending.close()  # The thread reads the end of the file and returns.
        os.close(self._stderr)

    def _wait(self) -> None:
        with self._receiving:
            while numbers := self._receiving.recv(1):
                if numbers[0] in STOP_SIGNALS:
                    self._note(signal.Signals(numbers[0]))

    def _note(self, number: signal.Signals) -> None:
        if self._at_once:
            self._exit(number, _AT_ONCE)
        now = time.monotonic()
        if number == self.requested and now < self._first_at + _ONE_SIGNAL_SECONDS:
            return
        if self.requested is not None:
            self._exit(number, "second signal: stopped at once, without a checkpoint")
        self.requested, self._first_at = number, now
        self._print(f"{number.name}: saving after this step; a second signal exits now")

    def _exit(self, number: signal.Signals, how: str) -> None:
        self._print(f"{number.name}: {how}")
        with contextlib.suppress(OSError):
            self.clean_up()
        os._exit(128 + number)  # As shells count.

    def _print(self, text: str) -> None:
        write_line(f"{text}.", self._stderr)


def stop_signals() -> set[signal.Signals]:
    """Returns the signals to handle: not SIGHUP where nohup ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return {*STOP_SIGNALS} - ({signal.SIGHUP} if ignored else set())


def _ignore(*unused: object) -> None:
    """Does nothing: without a handler a signal would not reach `set_wakeup_fd`."""


def write_line(text: str, descriptor: int = 2) -> None:
    """Writes a message from another thread than the main one, with program name."""
    # Not through sys.stderr, whose lock the main thread may hold; and not into a
    # full pipe, where a second signal would find this thread waiting.
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    if not writable.poll(_MOST_MILLISECONDS):
        return
    with contextlib.suppress(OSError):
        clear = CLEAR_LINE if os.isatty(descriptor) else ""
        os.write(descriptor, f"{clear}{invocation.program_name()}: {text}\n".encode())
