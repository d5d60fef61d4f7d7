"""A disk that fails under a run: what is kept, and from where the run goes on."""

import contextlib
import errno
import math
import os
import re
import subprocess
import sys
import types

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import runs
from cifar10 import files
from cifar10.errors import DiskError, UsageError
from cifar10.run_directory import checkpoints, logs
from cifar10.training import periodic, timing
from cifar10.training.progress import Progress
from recorded_runs import recorded
from small_towers import resolved

DATA = "state.data-00000-of-00001"
STEPS = list(range(1, 9))


@pytest.fixture(scope="module")
def train(stand_in_dir):
    """Trains in a directory; `after` steps something may happen."""
    log = periodic.Log.on_step

    def train(train_dir, *, after=None, **options):
        happens = dict(after or {})

        def happen_and_log(hook, step):
            happens.pop(step, lambda: None)()
            log(hook, step)

        usual = {"num_gpus": 1, "batch_size": 4, "log_frequency": 1}
        usual |= {"max_steps": STEPS[-1], "checkpoint_steps": 2}
        # A resume waits for a second without event files.
        clock = types.SimpleNamespace(time=iter(range(10**9, 2**31)).__next__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(periodic.Log, "on_step", happen_and_log)
            patch.setattr(timing, "MOST_SHARE", math.inf)
            patch.setattr(logs, "time", clock)
            runs.train(train_dir, stand_in_dir, **{**usual, **options})
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
    """The names of everything beside the checkpoints."""
    return sorted(path.name for path in (train_dir / "checkpoints").iterdir())


def published(*steps):
    return [f"step-{step:08d}" for step in steps]


def in_event_files(train_dir):
    """The steps of the loss in event files, as TensorBoard reads each of them."""
    steps = set()
    for path in (train_dir / "train").iterdir():
        events = event_accumulator.EventAccumulator(str(path)).Reload()
        if "total_loss" in events.Tags()["tensors"]:
            steps |= {event.step for event in events.Tensors("total_loss")}
    return steps


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
    if not sys.platform.startswith("linux"):
        pytest.skip("mount is used as on Linux")
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs"]
    if subprocess.run(["mount", *options, tmp_path], check=False).returncode:  # noqa: S607
        pytest.skip("only root may mount")
    yield Disk(tmp_path)
    subprocess.run(["umount", "--lazy", tmp_path], check=True)  # noqa: S607


def test_a_full_disk_ends_a_run_only_if_a_checkpoint_is_lost(
    disk, train, undisturbed, capsys
):
    """With histograms at every step, which do not fit into a file's last block."""
    train_dir = disk.path / "run"
    happens = {3: disk.fill, 5: disk.make_room, 7: disk.fill}
    options = {"summary_steps": 1, "checkpoint_steps": 8}
    with pytest.raises(DiskError, match="step 8"):
        train(train_dir, after=happens, **options)

    assert "cannot be written" in capsys.readouterr().err
    assert kept(train_dir) == []
    disk.make_room()
    options["checkpoint_steps"] = 2
    with pytest.raises(DiskError, match="step 4"):
        train(train_dir, after={3: disk.fill}, **options)
    assert kept(train_dir) == published(2)
    disk.make_room()
    train(train_dir, **options)
    assert "from step 2 " in capsys.readouterr().out
    assert final_state(train_dir) == final_state(undisturbed)
    logged = [line["step"] for line in runs.logged(train_dir)]
    assert logged == STEPS
    assert in_event_files(train_dir) >= {1, 2, *range(3, 9)}


def progress(train_dir, step, **options):
    """Returns a run of one variable of 1 MiB in a directory, at a step."""
    halted, trackables = tf.Variable(False), {"value": tf.Variable(tf.zeros([2**18]))}
    state = types.SimpleNamespace(halted=halted, trackables=lambda: trackables)
    training = types.SimpleNamespace(
        train_dir=train_dir,
        config=resolved(global_batch_size=4, **options),
        towers=types.SimpleNamespace(state=state),
        images=range(8),
        workers=types.SimpleNamespace(is_chief=True),
        run=recorded(train_dir, global_batch_size=4),
        determining=dict,
    )
    found = Progress(training)
    found.restore()
    found.step = step
    return found


def test_an_unreadable_log_does_not_prevent_a_checkpoint(tmp_path):
    training = progress(tmp_path, 2)
    (tmp_path / "metrics.jsonl").mkdir()
    training.save()
    assert kept(tmp_path) == published(2)
    assert progress(tmp_path, 2).last_saved() == 2


def test_unreadable_scores_are_an_error_once_the_checkpoint_is_saved(tmp_path):
    (tmp_path / "eval" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(DiskError, match="metrics"):
        progress(tmp_path, 2, keep_best=1).save()
    assert kept(tmp_path) == published(2)


def test_the_best_checkpoint_stays_although_its_score_was_not_logged(tmp_path):
    for step, score in ((2, 0.9), (4, 0.5), (6, 0.6)):
        training = progress(tmp_path, step, keep_best=1, keep_checkpoints=1)
        training.early_stopping = training.early_stopping.updated(step, score, 100)
        training.save()
    assert kept(tmp_path) == published(2, 6)


def test_logs_are_on_the_disk_before_the_manifest_that_has_their_digest(
    tmp_path, monkeypatch
):
    """Else an audit would accuse an honest run after a power loss."""
    synced = []

    def sync(path):
        synced.append(path.name)
        if path.suffix == ".jsonl":
            raise OSError(errno.EIO, "it is broken")

    monkeypatch.setattr(files, "sync", sync)
    progress(tmp_path, 2).save()
    before = synced[: synced.index("manifest.json")]
    assert {"metrics.jsonl", "starts.jsonl"} <= {*before}
    assert kept(tmp_path) == published(2)


def test_a_run_survives_unwritable_keep_file_and_event(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    training = progress(tmp_path, 2)
    training.keep()  # The folder of this step is gone.
    training.log_event(2, "rollback", "a fault")


def test_surplus_checkpoints_make_room_for_the_new_checkpoint(disk):
    """As when a run resumes with fewer of them; the newest always stays."""
    train_dir = disk.path / "run"
    train_dir.mkdir()
    for step in (2, 4):
        progress(train_dir, step).save()
    disk.fill()
    with pytest.raises(DiskError, match="keep_checkpoints"):
        progress(train_dir, 6, keep_checkpoints=2).save()
    assert kept(train_dir) == published(2, 4)
    progress(train_dir, 6, keep_checkpoints=1).save()
    assert kept(train_dir) == published(6)


def test_run_without_an_intact_checkpoint_does_not_start_over(tmp_path):
    for step in (2, 4):
        progress(tmp_path, step).save()
    before = runs.files(tmp_path / "checkpoints" / "step-00000002")
    for manifest in (tmp_path / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    with pytest.raises(UsageError, match=r"step-00000004/m.*step-00000002/m"):
        progress(tmp_path, 6)
    del before["manifest.json"]
    assert kept(tmp_path) == published(2, 4)
    assert runs.files(tmp_path / "checkpoints" / "step-00000002") == before


def test_damaged_checkpoint_is_passed_over_and_strays_stay(
    tmp_path, train, undisturbed, capsys
):
    train_dir = tmp_path / "run"
    train(train_dir, max_steps=6)
    folder = train_dir / "checkpoints"
    data = bytearray((folder / "step-00000006" / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "step-00000006" / DATA).write_bytes(data)
    (folder / "step-00000099").mkdir()  # As a copy that was broken off.
    (folder / "step-00000098").write_text("a file")
    (folder / "mine").mkdir()
    [events] = (train_dir / "train").iterdir()  # It ends in a torn record.
    *_, last = re.finditer(b"total_loss(?!/)", events.read_bytes())
    os.truncate(events, last.end())
    train(train_dir, keep_checkpoints=2)

    said = capsys.readouterr().out
    assert re.findall("PASSING OVER .* step ([0-9]+):", said) == ["99", "6"]
    assert "from step 4 " in said
    aside = ["damaged-step-00000006-1", "damaged-step-00000099-1"]
    strays = ["mine", "step-00000098"]
    assert kept(train_dir) == sorted([*aside, *strays, *published(6, 8)])
    assert final_state(train_dir) == final_state(undisturbed)
    assert [line["step"] for line in runs.logged(train_dir)] == STEPS
    assert in_event_files(train_dir) == {*STEPS}


def test_workers_continue_from_the_counts_of_the_chief(tmp_path):
    """Else they would end after other steps, and wait for each other for ever."""
    worker = progress(tmp_path, 2)
    of_chief = [7, 3, 2, 1, 4]
    worker.broadcast(types.SimpleNamespace(broadcast=lambda _, **__: of_chief))
    assert (worker.step, worker.left_out, worker.skipped_steps) == (7, 3, 2)
    assert worker.is_time_up is True
    assert worker.early_stopping.should_stop(4)
    assert not worker.early_stopping.should_stop(5)
