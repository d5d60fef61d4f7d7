"""A disk that fails under a run: what is said, and from where the run goes on."""

import contextlib
import os
import re
import subprocess
import sys
import time
import types

import keras
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import plugin_event_accumulator, tag_types
from tensorboard.summary.writer import event_file_writer

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, scores
from cifar10.training import console, profiling, summary_budget, train as training

DATA = "state.data-00000-of-00001"
INDEX = "state.index"
STEPS = list(range(1, 9))


@pytest.fixture(scope="module")
def train(stand_in_dir):
    """Trains a linear model in a directory; `after` steps something may happen."""

    def linear(image_shape, classes):
        layers = [keras.layers.Flatten(), keras.layers.Dense(classes)]
        return keras.Sequential([keras.Input(image_shape), *layers])

    advance = console.Console.on_step

    def train(train_dir, *, after=None, **options):
        happens = dict(after or {})

        def advance_and_happen(shown, step):
            advance(shown, step)
            happens.pop(step, lambda: None)()

        arguments = {"max_steps": STEPS[-1], "checkpoint_steps": 2, "log_frequency": 1}
        with pytest.MonkeyPatch.context() as patch:
            # Event files are numbered per process; every run is a process of its own.
            number = event_file_writer.AtomicCounter(0)
            patch.setattr(event_file_writer, "_global_uid", number)
            patch.setitem(models.REGISTRY, "linear", linear)
            patch.setattr(console.Console, "on_step", advance_and_happen)
            patch.setattr(summary_budget, "_MOST_SHARE", 100.0)  # None is postponed.
            training.train(
                Config(
                    train_dir=str(train_dir),
                    model="linear",
                    data="synthetic",
                    data_dir=str(stand_in_dir),
                    num_gpus=1,
                    batch_size=4,
                    **{**arguments, **options},
                )
            )
        assert not happens

    return train


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory):
    train_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(train_dir)
    return train_dir


def final_state(train_dir):
    """The bits of all variables, and the averages of the losses."""
    checkpoint = checkpoints.verify(train_dir / "checkpoints", STEPS[-1])
    values = runs.variables(checkpoint.path)
    variables = {name: value.tobytes() for name, value in values.items()}
    return variables, checkpoint.manifest["loss_averages"]


def kept(train_dir):
    """The names of all there is among the checkpoints."""
    return sorted(path.name for path in (train_dir / "checkpoints").iterdir())


def published(*steps):
    return [f"step-{step:08d}" for step in steps]


def logged(train_dir):
    return [line["step"] for line in runs.logged(train_dir)]


def shown(train_dir):
    """The steps of the loss that TensorBoard's server shows."""
    events = plugin_event_accumulator.EventAccumulator(
        str(train_dir / "train"), size_guidance={tag_types.TENSORS: 0}
    )
    events.Reload()
    return [event.step for event in events.Tensors("total_loss")]


def mount(*words):
    if not sys.platform.startswith("linux"):
        pytest.skip("mount is used as on Linux")
    done = subprocess.run(
        ["mount", *map(str, words)],  # noqa: S607 - the system's own.
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"only root may mount: {done.stderr.strip()}")


def unmount(path):
    subprocess.run(["umount", "--lazy", path], check=True)  # noqa: S607 - as above.


# A disk that fills.


class Disk:
    """A small disk in memory."""

    def __init__(self, path):
        self.path = path

    def fill(self):
        for size in (1 << 16, 1):  # To the last byte.
            with (
                contextlib.suppress(OSError),
                (self.path / "filler").open("ab", buffering=0) as file,
            ):
                while True:
                    file.write(bytes(size))

    def make_room(self):
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", path)
    yield Disk(path)
    unmount(path)


def test_a_full_disk_stops_the_run_and_it_goes_on_when_there_is_room(
    disk, train, undisturbed, capsys
):
    train_dir = disk.path / "run"
    with pytest.raises(UsageError) as caught:
        train(train_dir, after={4: disk.fill}, log_frequency=8)

    assert f"step 4 could not be written to {train_dir}" in str(caught.value)
    assert "No space left on device. That of step 2 is kept." in str(caught.value)
    assert kept(train_dir) == published(2), "a half-written one takes the room"
    disk.make_room()
    train(train_dir)
    assert "Resuming from step 2 " in capsys.readouterr().out
    assert final_state(train_dir) == final_state(undisturbed)


# With histograms at every step, which do not fit into the last block of the file.


def test_logs_on_a_full_disk_cost_what_is_logged_and_not_the_run(
    disk, train, undisturbed, capsys
):
    def make_room():
        time.sleep(1)  # Event files are read by the second in which they began.
        disk.make_room()

    train_dir = disk.path / "run"
    happens = {2: disk.fill, 7: make_room}
    train(train_dir, after=happens, checkpoint_steps=8, summary_steps=1)

    lost, again = capsys.readouterr().err.splitlines()
    assert f"logs in {train_dir} cannot be written: " in lost
    assert "No space left on device. The training continues; what it logs" in lost
    assert again.endswith("are written again.")
    assert final_state(train_dir) == final_state(undisturbed)
    # Step 2 is written if it fits into what is left of the file's last block.
    assert [step for step in shown(train_dir) if step != 2] == [1, 7, 8]


def test_a_profile_that_cannot_be_written_is_lost(tmp_path, monkeypatch, capsys):
    def stop():
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    profiler = types.SimpleNamespace(start=lambda _: None, stop=stop)
    monkeypatch.setattr(tf.profiler, "experimental", profiler)
    profile = profiling.StepProfile(2, 3, tmp_path)
    profile.start()
    profile.stop()
    said = capsys.readouterr().err
    assert said.endswith("No space left on device. The profile is lost.\n")


def test_checkpoints_beyond_the_number_make_room_for_the_new_one(disk, train):
    """As when a run resumes with fewer of them; the newest one always stays."""
    train_dir = disk.path / "run"
    train(train_dir, max_steps=4)
    assert kept(train_dir) == published(2, 4)
    disk.fill()
    filler = disk.path / "filler"
    os.truncate(filler, filler.stat().st_size - 2**17)  # For config.json and logs.
    with pytest.raises(UsageError, match="room for one more than --keep_checkpoints"):
        train(train_dir, keep_checkpoints=2, max_steps=6)
    assert kept(train_dir) == published(2, 4)
    train(train_dir, keep_checkpoints=1, max_steps=6)
    assert kept(train_dir) == published(6)


def test_a_run_goes_on_with_a_full_disk_and_saves_when_there_is_room(
    disk, train, undisturbed, capsys
):
    def make_room():
        time.sleep(1)  # Event files are read by the second in which they began.
        disk.make_room()

    train_dir = disk.path / "run"
    happens = {3: disk.fill, 7: make_room}
    train(train_dir, after=happens, on_save_error="continue", summary_steps=1)

    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4, "an outage of the logs is said once"
    assert "The training continues; what it logs meanwhile is lost." in said[0]
    for step, line in zip((4, 6), said[1:3], strict=True):
        assert f"The checkpoint of step {step} could not be written to" in line
        assert "No space left on device. That of step 2 is kept." in line
        assert "continues and tries again at the next checkpoint." in line
    assert said[3].endswith("are written again.")
    assert kept(train_dir) == published(2, 8)
    assert final_state(train_dir) == final_state(undisturbed)
    assert shown(train_dir) == [1, 2, 3, 7, 8]
    assert {1, 2, 3, 7, 8} <= set(logged(train_dir)), "a line is torn or lost"
    assert all(path.stat().st_size for path in (train_dir / "train").iterdir())


def test_a_run_that_cannot_keep_its_end_fails_whatever_was_asked_for(
    disk, train, capsys
):
    train_dir = disk.path / "run"
    with pytest.raises(UsageError) as caught:
        train(train_dir, after={7: disk.fill}, on_save_error="continue")

    assert "The checkpoint of step 8 could not be written" in str(caught.value)
    assert "That of step 6 is kept." in str(caught.value)
    assert "Done." not in capsys.readouterr().out
    assert kept(train_dir) == published(2, 4, 6)


# A folder that becomes read-only.


@contextlib.contextmanager
def locking(folder):
    """Yields two functions: one makes a folder read-only, one makes it writable."""
    if os.geteuid():
        yield lambda: folder.chmod(0o555), lambda: folder.chmod(0o755)
        return
    locked = []

    def lock():  # Root may write whatever the permissions are.
        mount("--bind", folder, folder)
        locked.append(folder)
        mount("-o", "remount,bind,ro", folder)

    def unlock():
        unmount(locked.pop())

    try:
        yield lock, unlock
    finally:
        if locked:
            unlock()


def test_a_folder_that_becomes_read_only_stops_the_run(
    tmp_path, train, undisturbed, capsys
):
    train_dir = tmp_path / "run"
    with locking(train_dir / "checkpoints") as (lock, unlock):
        with pytest.raises(UsageError) as caught:
            train(train_dir, after={3: lock})
        unlock()

    assert "The checkpoint of step 4 could not be written" in str(caught.value)
    assert "Read-only file system" in str(caught.value) or os.geteuid()
    assert "That of step 2 is kept. Make room there or make it wri" in str(caught.value)
    assert kept(train_dir) == published(2)
    train(train_dir)
    assert "Resuming from step 2 " in capsys.readouterr().out
    assert final_state(train_dir) == final_state(undisturbed)


def test_a_run_goes_on_without_a_folder_that_is_read_only_for_a_time(
    tmp_path, train, undisturbed, capsys
):
    train_dir = tmp_path / "run"
    with locking(train_dir / "checkpoints") as (lock, unlock):
        train(train_dir, after={3: lock, 5: unlock}, on_save_error="continue")

    [said] = capsys.readouterr().err.splitlines()
    assert "The checkpoint of step 4 could not be written" in said
    assert kept(train_dir) == published(2, 6, 8)
    assert final_state(train_dir) == final_state(undisturbed)


def test_what_a_failing_disk_kept_half_written_is_deleted_by_the_next_save(
    tmp_path, train, monkeypatch
):
    """A disk that takes no deletion either."""
    rmtree, rename = checkpoints.shutil.rmtree, checkpoints.Path.rename
    train_dir = tmp_path / "run"

    def fail(path, *_, **__):
        if path.name.startswith(checkpoints.INCOMPLETE):
            raise OSError(5, "Input/output error")

    def break_down():
        monkeypatch.setattr(checkpoints.Path, "rename", fail)
        monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: None)

    def come_back():
        assert len(kept(train_dir)) == 2, "nothing is left half-written"
        monkeypatch.setattr(checkpoints.Path, "rename", rename)
        monkeypatch.setattr(checkpoints.shutil, "rmtree", rmtree)

    happens = {3: break_down, 5: come_back}
    train(train_dir, after=happens, on_save_error="continue")
    assert kept(train_dir) == published(2, 6, 8)


# Checkpoints that a disk has damaged.


def flip_a_bit(folder):
    data = bytearray((folder / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / DATA).write_bytes(data)


DAMAGE = {
    "flipped bit": flip_a_bit,
    "no shard": lambda folder: (folder / DATA).unlink(),
    "empty shard": lambda folder: os.truncate(folder / DATA, 0),
    "empty index": lambda folder: os.truncate(folder / INDEX, 0),
    "empty manifest": lambda folder: os.truncate(folder / checkpoints.MANIFEST, 0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path, train, undisturbed, capsys, damage
):
    train_dir = tmp_path / "run"
    train(train_dir, max_steps=6)
    damage(train_dir / "checkpoints" / "step-00000006")
    train(train_dir)

    said = capsys.readouterr().out
    assert "PASSING OVER the damaged checkpoint of step 6: " in said
    assert "Resuming from step 4 " in said
    assert kept(train_dir) == ["damaged-step-00000006-1", *published(2, 4, 6, 8)]
    assert final_state(train_dir) == final_state(undisturbed)
    assert logged(train_dir) == STEPS


# What else may lie there.


def test_strays_among_the_checkpoints_cost_none(tmp_path, train, undisturbed, capsys):
    train_dir = tmp_path / "run"
    folder = train_dir / "checkpoints"

    def litter():
        (folder / "step-00000099").mkdir()  # As a copy that was broken off.
        (folder / "step-00000098").write_text("a file")
        (folder / ".nfs0001").write_text("open elsewhere")
        (folder / "mine").mkdir()

    train(train_dir, after={3: litter}, max_steps=6, keep_checkpoints=1)
    assert "step-00000006" in kept(train_dir)
    train(train_dir, keep_checkpoints=1)

    said = capsys.readouterr().out
    assert "PASSING OVER the damaged checkpoint of step 99: " in said
    assert "Resuming from step 6 " in said
    strays = ["damaged-step-00000099-1", "mine", "step-00000098", ".nfs0001"]
    assert kept(train_dir) == sorted([*strays, "step-00000008"])
    assert final_state(train_dir) == final_state(undisturbed)


@pytest.mark.parametrize(
    ("cut", "left"),
    [
        pytest.param(lambda content: 0, [], id="empty"),
        pytest.param(lambda content: 5, [], id="torn header"),
        pytest.param(
            lambda content: [*re.finditer(b"total_loss(?!/)", content)][-1].end(),
            [1, 2, 3],
            id="torn record",
        ),
    ],
)
def test_an_event_file_that_was_cut_short_costs_what_was_cut(
    tmp_path, train, cut, left
):
    train_dir = tmp_path / "run"
    train(train_dir, max_steps=4)
    [events] = (train_dir / "train").iterdir()
    os.truncate(events, cut(events.read_bytes()))
    # Older than what follows; its name begins with the second it was made in.
    *head, second, tail = events.name.split(".", 4)
    events.rename(events.with_name(".".join([*head, str(int(second) - 10), tail])))
    train(train_dir)

    assert shown(train_dir) == [*left, 5, 6, 7, 8]
    assert logged(train_dir) == STEPS


# What is kept.


def test_a_training_keeps_what_eval_scored_best(tmp_path, train):
    train_dir = tmp_path / "run"

    def evaluate():
        (train_dir / "eval").mkdir()
        for step, precision in ((2, 0.7), (4, 0.6)):
            scores.append(train_dir / "eval", step, {"precision @ 1": precision}, 10)
        with (train_dir / "eval" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "precision @')  # Eval was killed here.

    train(train_dir, after={5: evaluate}, keep_checkpoints=2, keep_best=1)

    assert kept(train_dir) == published(2, 6, 8)


def test_a_training_keeps_one_every_some_hours(tmp_path, train):
    train_dir = tmp_path / "run"
    train(train_dir, keep_checkpoints=1, keep_every_hours=10)
    assert kept(train_dir) == published(2, 8)

    train(train_dir, max_steps=12, keep_checkpoints=1)
    assert kept(train_dir) == published(2, 12)
