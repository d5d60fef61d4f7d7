"""How a run handles signals, without a run."""

import contextlib
import os
import signal
import time

import runs
from cifar10.process import signals


@contextlib.contextmanager
def deferring(hangup=signal.SIG_DFL):
    """Notes signals as a run does; SIGHUP was handled so before."""
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


def test_a_signal_claimed_by_a_library_is_taken_back():
    """TensorFlow claims SIGTERM when it connects several machines."""
    with deferring() as stop:
        claimed = []
        signal.signal(signal.SIGTERM, lambda number, _frame: claimed.append(number))
        stop.reinstall()
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for_request(stop) is signal.SIGTERM
        assert not claimed


def test_a_signal_sent_twice_at_once_counts_once():
    """A scheduler may signal the training and what passes signals on to it."""
    with deferring() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.02)
        assert wait_for_request(stop) is signal.SIGUSR1


def test_a_different_second_signal_exits_at_once(monkeypatch):
    """Whoever ends a program right after Ctrl-C does not wait for its step."""
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    with deferring() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for_request(stop)
        os.kill(os.getpid(), signal.SIGTERM)
        while not ended:
            time.sleep(0.01)
    assert ended == [128 + signal.SIGTERM]


def test_hangup_stops_a_run_unless_nohup_has_it_ignored():
    """As when the connection of a terminal is lost."""
    with deferring() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert wait_for_request(stop) is signal.SIGHUP
    with deferring(hangup=signal.SIG_IGN) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.1)
        assert stop.requested is None


ENDS_ITSELF = """
import os, signal, sys, time
from pathlib import Path
from cifar10.process.signals import StopSignals
with StopSignals() as stop:
    stop.clean_up = lambda: Path(sys.argv[1]).unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_signal_before_a_run_cleans_up_and_ends_the_program(tmp_path):
    """Also where whoever reads stderr has stopped, as in `train.py 2>&1 | less`."""
    lock = tmp_path / ".lock"
    lock.touch()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    os.set_blocking(writing, True)
    with (
        open(writing, "w") as stderr,  # noqa: PTH123 - it is open.
        runs.started_anew(
            "-c", ENDS_ITSELF, lock, stderr=stderr, cwd=runs.ROOT
        ) as process,
    ):
        assert process.wait() == 128 + signal.SIGTERM
    os.close(reading)
    assert not lock.exists()
