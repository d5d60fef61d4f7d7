"""One training at a time in a run directory, until it ends, however it ends."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tensorflow as tf

from cifar10.config import cli
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, claim
from cifar10.training import train as training
from cifar10.training.progress import Progress

ROOT = Path(__file__).parents[2]


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


@pytest.mark.slow
def test_a_second_training_is_refused_until_the_first_has_died(
    running, stand_in_dir, capsys
):
    process, train_dir = running

    def train(place=train_dir, **options):
        config = Config(
            num_gpus=1,
            batch_size=1,
            train_dir=str(place),
            data="synthetic",
            data_dir=str(stand_in_dir),
            **options,
        )
        cli.run(lambda: training.train(config))
        return capsys.readouterr().out

    half_written = train_dir / "checkpoints" / f".incomplete-step-99-{process.pid}"
    half_written.mkdir()
    link = train_dir.with_name("link")
    link.symlink_to(train_dir)
    before = sorted(train_dir.parent.rglob("*"))
    for place, fresh in ((train_dir, False), (train_dir, True), (link, False)):
        with pytest.raises(SystemExit) as ended:
            train(place, fresh=fresh, max_steps=1)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"--train_dir {place} {held_by(process.pid)}" in said
        assert sorted(train_dir.parent.rglob("*")) == before, "it touched the run"

    process.kill()
    process.wait()
    newest = checkpoints.steps(train_dir / "checkpoints")[-1]
    assert f"from step {newest} " in train(max_steps=newest + 1)


def refuse(path):
    """Expects that a training in a directory is refused."""
    with pytest.raises(UsageError, match=held_by(os.getpid())), claim.hold(path):
        pass


def begun(train_dir, held, *, fresh=False):
    """Begins a run in a directory that is held."""
    settings = {"batch_size": 1}
    earlier = claim.check(train_dir, settings, ["batch_size"], fresh=fresh)
    claim.begin(train_dir, settings, earlier, held, fresh=fresh)


def test_the_lock_goes_to_the_new_directory_when_the_run_is_moved_aside(tmp_path):
    train_dir = tmp_path / "run"
    with claim.hold(train_dir) as held:
        begun(train_dir, held)
    with claim.hold(train_dir) as held:
        begun(train_dir, held, fresh=True)
        refuse(train_dir)
        with claim.hold(tmp_path / "run.1"):  # Nobody trains there any more.
            pass
    for name in ("run", "run.1"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["config.json"]


def test_a_directory_that_another_training_took_meanwhile_is_left_to_it(
    tmp_path, monkeypatch
):
    train_dir = tmp_path / "run"
    rename = Path.rename
    with contextlib.ExitStack() as other:

        def rename_and_lose(path, target):
            rename(path, target)
            other.enter_context(claim.hold(train_dir))
            return target

        with claim.hold(train_dir) as held:
            begun(train_dir, held)
            monkeypatch.setattr(Path, "rename", rename_and_lose)
            with pytest.raises(UsageError, match="is in use by another training"):
                begun(train_dir, held, fresh=True)
            refuse(train_dir)


@pytest.mark.parametrize("spelling", ["link", "folder/../run", "folder/link/../run"])
def test_a_directory_has_one_lock_by_whatever_path(tmp_path, spelling):
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("../run")
    with claim.hold(train_dir):
        refuse(tmp_path / spelling)
    with claim.hold(tmp_path / spelling):
        refuse(train_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_directory_has_one_lock_for_all_users(tmp_path):
    """Whether they may write to its parent or not."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):  # All but / and /tmp.
        folder.chmod(0o755)
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    train_dir.chmod(0o777)
    with claim.hold(train_dir):
        os.seteuid(65534)
        try:
            refuse(train_dir)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_lock_that_links_to_another_file_leaves_it_alone(tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    precious.chmod(0o600)
    train_dir = tmp_path / "run"
    train_dir.mkdir()
    getattr(train_dir / ".lock", link)(precious)
    with pytest.raises(UsageError, match="run cannot be used: "), claim.hold(train_dir):
        pass
    assert precious.read_text() == "precious"
    assert precious.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_where_something_else_than_a_run_is(tmp_path):
    (tmp_path / "thesis").touch()
    before = tmp_path.stat().st_mtime_ns
    with pytest.raises(UsageError, match="holds files but no run"):
        claim.hold(tmp_path).__enter__()
    assert tmp_path.stat().st_mtime_ns == before


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


def test_a_holders_name_commands_no_terminal(tmp_path):
    with (tmp_path / ".lock").open("w") as held:
        held.write("\x1b]0;owned\x07")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError) as error, claim.hold(tmp_path):
            pass
    assert r"another training: \x1b]0;owned\x07." in str(error.value)


def small_state():
    return types.SimpleNamespace(
        halted=tf.Variable(False), trackables=lambda: {"step": tf.Variable(0)}
    )


def test_a_training_whose_directory_was_moved_writes_to_no_other(tmp_path):
    """Where it was, another training may have begun by now."""
    train_dir, moved = tmp_path / "run", tmp_path / "moved"
    train_dir.mkdir()
    config = Config(global_batch_size=8)
    progress = Progress(train_dir, small_state(), config, 8)
    progress.restore()
    progress.save({}, last=False)
    train_dir.rename(moved)
    progress.step = 8
    with pytest.raises(UsageError, match="If it was moved, give its new place"):
        progress.save({}, last=False)
    train_dir.mkdir()
    with pytest.raises(UsageError, match="is another directory by now"):
        progress.save({}, last=False)
    assert [*train_dir.iterdir()] == []
    assert checkpoints.steps(moved / "checkpoints") == [0]


@pytest.mark.parametrize("other_trains", [True, False])
def test_a_training_whose_lock_was_deleted_writes_nothing_more(tmp_path, other_trains):
    """Neither over what another one has written meanwhile, nor does it unlock that."""
    train_dir = tmp_path / "run"
    lock = train_dir / ".lock"
    with contextlib.ExitStack() as other:
        with claim.hold(train_dir) as held:
            begun(train_dir, held)
            progress = Progress(
                train_dir, small_state(), Config(global_batch_size=8), 8
            )
            progress.restore()
            progress.save({}, last=False)
            lock.unlink()
            if other_trains:
                other.enter_context(claim.hold(train_dir))
            progress.step = 8
            for write in (lambda: progress.save({}, last=True), progress.roll_back):
                with pytest.raises(UsageError, match=r"its \.lock, .* was deleted"):
                    write()
        assert lock.exists() is other_trains
    assert checkpoints.steps(train_dir / "checkpoints") == [0]


def test_a_lock_is_named_by_its_newest_holder(tmp_path):
    lock = tmp_path / ".lock"
    lock.write_text("process 123456789012345 on a longer name")
    with claim.hold(tmp_path):
        held = lock.read_text()
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


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_lock_file_goes_when_the_run_ends(tmp_path, error):
    """And so does a directory that nothing was written to."""
    expected = pytest.raises(error) if error else contextlib.nullcontext()
    with expected, claim.hold(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").exists()
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
            (tmp_path / ".lock").unlink()  # Between opening it and locking it.
        flock(*arguments)

    monkeypatch.setattr(claim.fcntl, "flock", late)
    with claim.hold(tmp_path):
        held = (tmp_path / ".lock").read_text()
        assert held.startswith(f"process {os.getpid()} on ")
        refuse(tmp_path)
    assert list(tmp_path.iterdir()) == []
