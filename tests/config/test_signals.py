"""What the training makes of signals, without a training."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runs
from cifar10.config import signals

ROOT = Path(__file__).parents[2]
CLEAR = "\r\x1b[K"


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


@pytest.mark.parametrize("nohup", [False, True])
def test_a_hangup_stops_a_training_unless_nohup_has_it_ignored(nohup):
    """As when the connection of a terminal is lost."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        # Else it would end this process where the training does not handle it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else lambda *_: None)
        with signals.StopSignals() as stop:
            stop.defer()
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert stop.requested is (None if nohup else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_taken_back_that_was_never_taken():
    """A program that trains without the scripts keeps its own handlers."""
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
    time.sleep(0.5 if "defer" in sys.argv else 60)
"""


def in_a_terminal(*words):
    """Returns the exit code of a program, and what it writes to a terminal."""
    terminal, other_end = pty.openpty()
    program = [sys.executable, "-c", ENDS_ITSELF, *map(str, words)]
    code = subprocess.run(program, stderr=other_end, cwd=ROOT, check=False).returncode
    said = os.read(terminal, 1000).decode()
    os.close(terminal)
    os.close(other_end)
    return code, said


def test_a_signal_before_the_first_step_ends_the_program_at_once(tmp_path):
    lock = tmp_path / ".lock"
    lock.touch()
    code, said = in_a_terminal(lock)
    assert code == 128 + signal.SIGTERM
    # On a line of its own, also where there is a progress bar or a ^C.
    assert (
        said == f"{CLEAR}-c: SIGTERM: interrupted; there was nothing to save yet.\r\n"
    )
    assert not lock.exists()


def test_a_signal_between_steps_is_noted_on_a_line_of_its_own(tmp_path):
    code, said = in_a_terminal(tmp_path / "none", "defer")
    assert code == 0
    assert said.startswith(f"{CLEAR}-c: SIGTERM: saving after this step; ")


def test_a_signal_ends_what_writes_to_a_reader_that_has_stopped():
    """As `train.py 2>&1 | less` does."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    os.set_blocking(writing, True)
    program = [sys.executable, "-c", ENDS_ITSELF, "none"]
    ended = subprocess.run(program, stderr=writing, cwd=ROOT, check=False, timeout=40)
    os.close(reading)
    os.close(writing)
    assert ended.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_a_signal_while_tensorflow_is_imported_is_acknowledged(tmp_path, script):
    """Though what TensorFlow writes to stderr is hidden."""
    (tmp_path / "tensorflow.py").write_text(
        "import sys, time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [ROOT / script, "--train_dir", tmp_path / "run"]
    with runs.started(*words, env=environment) as process:
        runs.read_until(process.stdout, "importing")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert said == (
        "Starting TensorFlow ...\n"
        f"{script}: SIGINT: interrupted; there was nothing to save yet.\n"
    )
    assert {path.name for path in tmp_path.iterdir()} <= {
        "tensorflow.py",
        "__pycache__",
    }
