"""What the training makes of signals, without a training."""

import os
import signal
import time

from cifar10.config import signals


def test_a_signal_that_a_library_has_claimed_is_taken_back():
    """TensorFlow claims SIGTERM when it connects several machines."""
    with signals.StopSignals() as stop:
        stop.defer()
        claimed = []
        signal.signal(signal.SIGTERM, lambda number, _frame: claimed.append(number))
        stop.reinstall()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while stop.requested is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.requested is signal.SIGTERM
        assert not claimed


def test_one_signal_that_comes_twice_at_once_is_one():
    """A scheduler may signal the training and what passes signals on to it."""
    with signals.StopSignals() as stop:
        stop.defer()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
        assert stop.requested is signal.SIGUSR1


def test_nothing_is_taken_back_that_was_never_taken():
    """A program that trains without the scripts keeps its own handlers."""
    before = signal.getsignal(signal.SIGTERM)
    signals.StopSignals().reinstall()
    assert signal.getsignal(signal.SIGTERM) is before
