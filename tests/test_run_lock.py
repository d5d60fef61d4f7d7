"""One training at a time in a run directory, until it ends, however it ends."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cifar10.config import cli
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, claim
from cifar10.training import train as training

ROOT = Path(__file__).parent.parent


def held_by(process_id):
    return (
        f"is in use by another training: process {process_id} on "
        f"{socket.gethostname()}. Wait for its end, stop it, or choose another"
    )


@pytest.fixture
def running(tmp_path, stand_in_dir):
    """A training in a process of its own, beyond its first checkpoint."""
    train_dir = tmp_path / "run"
    words = {
        "train_dir": train_dir,
        "data": "synthetic",
        "data_dir": stand_in_dir,
        "batch_size": 1,
        "checkpoint_steps": 10,
        "log_frequency": 1,
    }
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "train.py"),
            *(f"--{name}={value}" for name, value in words.items()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 12,"):
            break
    assert process.poll() is None, said
    # It goes no further while the test looks; the lock stays.
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process, train_dir
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_training_is_refused_until_the_first_has_died(
    running, stand_in_dir, capsys
):
    process, train_dir = running

    def train(**options):
        config = Config(
            num_gpus=1,
            batch_size=1,
            train_dir=str(train_dir),
            data="synthetic",
            data_dir=str(stand_in_dir),
            **options,
        )
        cli.run(lambda: training.train(config))
        return capsys.readouterr().out

    before = sorted(train_dir.parent.rglob("*"))
    for fresh in (False, True):
        with pytest.raises(SystemExit) as ended:
            train(fresh=fresh, max_steps=1)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"--train_dir {train_dir} {held_by(process.pid)}" in said
        assert sorted(train_dir.parent.rglob("*")) == before, "it touched the run"

    process.kill()
    process.wait()
    newest = checkpoints.steps(train_dir / "checkpoints")[-1]
    assert f"from step {newest} " in train(max_steps=newest + 1)


def test_the_lock_stays_when_the_directory_is_moved_aside(tmp_path):
    train_dir = tmp_path / "run"
    with claim.hold(train_dir):
        train_dir.mkdir()
        train_dir.rename(tmp_path / "run.1")
        with (
            pytest.raises(UsageError, match=held_by(os.getpid())),
            claim.hold(train_dir),
        ):
            pass
    with claim.hold(train_dir):
        pass


def test_runs_beside_each_other_do_not_lock_each_other(tmp_path):
    with claim.hold(tmp_path / "run"), claim.hold(tmp_path / "run.1"):
        pass


def test_a_refused_training_leaves_the_holders_name(tmp_path):
    train_dir = tmp_path / "run"
    with claim.hold(train_dir):
        for _ in range(2):
            with (
                pytest.raises(UsageError, match=f"process {os.getpid()} on "),
                claim.hold(train_dir),
            ):
                pass


def test_a_lock_is_named_by_its_newest_holder(tmp_path):
    (tmp_path / ".run.lock").write_text("process 123456789012345 on a longer name")
    with claim.hold(tmp_path / "run"):
        held = (tmp_path / ".run.lock").read_text()
    assert held == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_file_system_without_locks_is_a_usage_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claim.fcntl, "flock", fail)
    with (
        pytest.raises(UsageError, match="run cannot be used: No locks available"),
        claim.hold(tmp_path / "run"),
    ):
        pass


def test_the_lock_is_in_the_directory_where_its_parent_is_not_ours(
    tmp_path, monkeypatch
):
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    (train_dir / "config.json").write_text(json.dumps({}))
    monkeypatch.setattr(claim.os, "access", lambda *_: False)
    with claim.hold(train_dir):
        assert (train_dir / ".run.lock").exists()
    assert not (tmp_path / ".run.lock").exists()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_lock_file_goes_when_the_run_ends(tmp_path, error):
    expected = pytest.raises(error) if error else contextlib.nullcontext()
    with expected, claim.hold(tmp_path / "run") as lock:
        assert lock == tmp_path / ".run.lock"
        assert lock.exists()
        if error:
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_its_holder_deletes_just_then_is_made_anew(
    tmp_path, monkeypatch
):
    flock, calls = claim.fcntl.flock, []

    def late(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            (tmp_path / ".run.lock").unlink()  # Between opening it and locking it.
        flock(*arguments)

    monkeypatch.setattr(claim.fcntl, "flock", late)
    with claim.hold(tmp_path / "run") as lock:
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(UsageError, match="in use"), claim.hold(tmp_path / "run"):
            pass
    assert list(tmp_path.iterdir()) == []
