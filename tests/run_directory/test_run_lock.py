"""One run at a time in a run directory, until it ends, however it ends."""

import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

import runs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import lock as locks, starting
from cifar10.run_directory.lock import RunLock, is_locked
from cifar10.training import preflight
from recorded_runs import recorded

# Trains beyond a checkpoint, and waits there.
_HOLDER = """
import sys, time
from cifar10.config.config import Config
from cifar10.training import train

class Waiting:
    def on_step(self, step):
        if step == 3:
            print("waiting", flush=True)
            time.sleep(300)

words = dict(word.split("=") for word in sys.argv[1:])
options = {"batch_size": 1, "checkpoint_steps": 2, "num_gpus": 1}
config = Config(data="synthetic", **options, **words)
train.train(config, hooks=[Waiting()])
"""


def test_a_run_waits_while_a_list_of_runs_looks_at_its_lock(tmp_path):
    with RunLock(tmp_path / "run"):
        pass
    (tmp_path / "run").mkdir(exist_ok=True)
    with (tmp_path / "run/.lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        later = threading.Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        later.start()
        with RunLock(tmp_path / "run"):
            later.join()


def test_another_users_lock_is_held_if_chmod_is_refused(tmp_path, monkeypatch):
    def refuse_change(*_):
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refuse_change)
    with RunLock(tmp_path / "run"):
        assert is_locked(tmp_path / "run")


def test_second_run_is_refused_until_the_first_has_died(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    words = [f"train_dir={train_dir}", f"data_dir={stand_in_dir}"]
    with runs.started("-c", _HOLDER, *words, f"model={runs.SMALL}") as holder:
        runs.read_until(holder.stdout, "waiting")
        half_written = train_dir / "checkpoints" / f".incomplete-step-99-{holder.pid}"
        half_written.mkdir()
        (tmp_path / "link").symlink_to(train_dir)
        before = sorted(tmp_path.rglob("*"))
        options = {"batch_size": 1, "max_steps": 3}
        for place, fresh in (("run", []), ("run", ["--fresh"]), ("link", [])):
            flags = runs.training_flags(tmp_path / place, stand_in_dir, **options)
            done = runs.call("train.py", *flags, *fresh)
            assert done.returncode == 2
            assert f"process {holder.pid} on {socket.gethostname()}" in done.stderr
            assert sorted(tmp_path.rglob("*")) == before, "it touched the run"
        holder.kill()
        holder.wait()

    flags = runs.training_flags(train_dir, stand_in_dir, **options)
    done = runs.call("train.py", *flags, "--checkpoint_steps", 2)
    assert "from step 2 " in done.stdout, done.stderr


def refuse(path):
    """Expects that a run in a directory is refused, with the holder's name."""
    name = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(UsageError, match=name), RunLock(path):
        pass


def begun(train_dir, lock, *, fresh=False):
    """Begins a run in a directory that is held."""
    settings = {**Config(batch_size=1).values, "global_batch_size": 1}
    settings |= {"parameters": 1, "simulated": False}
    run = recorded(train_dir, **settings)
    earlier = preflight.check_run(run, {"batch_size": 1}, fresh=fresh)
    starting.start_run(run, earlier, lock, fresh=fresh)


def test_the_lock_goes_to_the_new_directory_when_the_run_is_moved_aside(tmp_path):
    train_dir = tmp_path / "run"
    with RunLock(train_dir) as lock:
        begun(train_dir, lock)
    with RunLock(train_dir) as lock:
        begun(train_dir, lock, fresh=True)
        refuse(train_dir)
        with RunLock(tmp_path / "run.1"):  # Nobody trains there any more.
            pass
    for name in ("run", "run.1"):
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {".lock", "config.json"}


def test_a_directory_taken_by_another_training_is_left_to_it(tmp_path, monkeypatch):
    train_dir = tmp_path / "run"
    rename = Path.rename
    with contextlib.ExitStack() as other:

        def rename_and_lose(path, target):
            rename(path, target)
            other.enter_context(RunLock(train_dir))
            return target

        with RunLock(train_dir) as lock:
            begun(train_dir, lock)
            monkeypatch.setattr(Path, "rename", rename_and_lose)
            with pytest.raises(UsageError, match="use"):
                begun(train_dir, lock, fresh=True)
            refuse(train_dir)


def test_a_directory_has_one_lock_under_all_its_paths(tmp_path):
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("../run")
    for spelling in ("link", "folder/link/../run"):
        with RunLock(train_dir):
            refuse(tmp_path / spelling)
            refuse(tmp_path / spelling)  # It was not unlocked.
        with RunLock(tmp_path / spelling):
            refuse(train_dir)


def test_a_lock_deleted_while_a_run_waits_for_it_is_made_anew(tmp_path, monkeypatch):
    """By a run that ended before it began; else two runs would hold it."""
    take, lock = locks._take, tmp_path / "run" / ".lock"

    def take_late(file):
        monkeypatch.setattr(locks, "_take", take)
        lock.unlink()
        take(file)

    monkeypatch.setattr(locks, "_take", take_late)
    with RunLock(tmp_path / "run"):
        assert is_locked(tmp_path / "run")
        refuse(tmp_path / "run")
    assert not (tmp_path / "run").exists() or not lock.exists()


def test_a_lock_that_another_run_has_made_is_left_to_it(tmp_path):
    path = tmp_path / "run"
    first = RunLock(path)
    with first:
        (path / ".lock").unlink()  # By somebody who took it for a leftover.
        with RunLock(path):
            first.release()
            refuse(path)
            first.release()  # As a signal may do once more.
            refuse(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_directory_has_one_lock_for_all_users(tmp_path):
    """Whether they may write to its parent or not."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):  # All but / and /tmp.
        folder.chmod(0o755)
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    train_dir.chmod(0o777)
    with RunLock(train_dir):
        os.seteuid(65534)
        try:
            refuse(train_dir)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_lock_linked_to_another_file_is_refused_and_changes_nothing(tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    precious.chmod(0o600)
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    getattr(train_dir / ".lock", link)(precious)
    with pytest.raises(UsageError, match="cannot be used"), RunLock(train_dir):
        pass
    assert precious.read_text() == "precious"
    assert precious.stat().st_mode & 0o777 == 0o600


def test_a_holders_name_cannot_control_the_terminal(tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        lock.write("\x1b]0;owned\x07")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError) as error, RunLock(tmp_path):
            pass
    assert r"\x1b]0;owned\x07" in str(error.value)
