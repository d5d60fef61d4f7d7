"""What the training makes of signals, without a training."""

import contextlib
import os
import pty
import signal
import time

import runs
from cifar10.config import signals

CLEAR = "\r\x1b[K"


@contextlib.contextmanager
def deferring(hangup=signal.SIG_DFL):
    """Notes signals as a training does; SIGHUP was handled so before."""
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        with signals.StopSignals() as stop:
            stop.defer()
            yield stop
    finally:
        signal.signal(signal.SIGHUP, before)


def wait_for_request(stop):
    """Waits until a thread has noted a signal."""
    while stop.requested is None:
        time.sleep(0.01)
    return stop.requested


def test_a_signal_that_a_library_has_claimed_is_taken_back():
    """TensorFlow claims SIGTERM when it connects several machines."""
    with deferring() as stop:
        claimed = []
        signal.signal(signal.SIGTERM, lambda number, _frame: claimed.append(number))
        stop.reinstall()
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for_request(stop) is signal.SIGTERM
        assert not claimed


def test_signal_that_comes_twice_at_once_counts_once():
    """A scheduler may signal the training and what passes signals on to it."""
    with deferring() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.02)
        assert wait_for_request(stop) is signal.SIGUSR1


def test_hangup_stops_a_training_unless_nohup_has_it_ignored():
    """As when the connection of a terminal is lost."""
    with deferring() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert wait_for_request(stop) is signal.SIGHUP
    with deferring(hangup=signal.SIG_IGN) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.1)
        assert stop.requested is None


def test_handlers_of_a_program_that_does_not_ask_stay():
    """As of one that trains without the scripts."""
    before = signal.getsignal(signal.SIGTERM)
    signals.StopSignals().reinstall()
    assert signal.getsignal(signal.SIGTERM) is before


ENDS_ITSELF = """
import os, signal, sys, time
from pathlib import Path
from cifar10.config.signals import StopSignals
with StopSignals() as stop:
    stop.clean_up = lambda: Path(sys.argv[1]).unlink(missing_ok=True)
    if "defer" in sys.argv:
        stop.defer()
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested:
        time.sleep(0.01)
    time.sleep(0.5)  # Another thread still says so.
"""


def ends_itself(*words, stderr):
    """Returns the exit code of a program that sends itself SIGTERM."""
    with runs.started("-c", ENDS_ITSELF, *words, stderr=stderr) as process:
        return process.wait()


def test_signal_is_noted_on_a_line_of_its_own_in_a_terminal(tmp_path):
    """Also where there is a progress bar or a ^C."""
    lock = tmp_path / ".lock"
    for words, code in (([lock], 128 + signal.SIGTERM), ([lock, "defer"], 0)):
        lock.touch()
        terminal, other_end = pty.openpty()
        with open(other_end, "w") as stderr:  # noqa: PTH123 - it is open.
            assert ends_itself(*words, stderr=stderr) == code
            shown = os.read(terminal, 1000).decode()
        os.close(terminal)
        assert shown.startswith(f"{CLEAR}-c: SIGTERM: ")
        assert shown.endswith(".\r\n")
        assert lock.exists() is (code == 0), "the clean-up is for an end at once"


def test_signal_ends_a_program_whose_reader_has_stopped(tmp_path):
    """As `train.py 2>&1 | less` does."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    os.set_blocking(writing, True)
    with open(writing, "w") as stderr:  # noqa: PTH123 - it is open.
        code = ends_itself(tmp_path / "none", stderr=stderr)
    os.close(reading)
    assert code == 128 + signal.SIGTERM
