"""Event files and metrics.jsonl, read back as TensorBoard and scripts read them."""

import contextlib
import errno
import io
import json
import math
import os
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.summary.writer import event_file_writer

from cifar10.config import fields, options
from cifar10.config.schema import EVENT
from cifar10.run_directory import logs
from cifar10.training.hooks import Run, Summary
from cifar10.training.tensorboard import TensorBoard
from cifar10.training.timing import Timer
from event_readers import read, read_as_the_server, tensors

needs_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="/dev/full is of Linux only"
)


def fill_disk(path):
    """Makes every further write to an open file fail as on a full disk."""
    for link in Path("/proc/self/fd").iterdir():
        # The folder's own descriptor is closed once it is listed.
        if link.is_symlink() and link.readlink() == path:
            with open("/dev/full", "wb") as full:  # noqa: PTH123 - as a descriptor.
                os.dup2(full.fileno(), int(link.name))
            return
    raise AssertionError(f"{path} is not open")


def summary(**tensors):
    return Summary(tf.ones([1, 2, 2, 3]), {"a": np.ones([3])}, tensors, {})


WRITES = {
    "scalars": lambda board: board.on_log(10, {"total_loss": 4.5}),
    "summaries": lambda board: board.on_summary(10, summary(w=tf.ones([3]))),
}


# The settings of a run that no run resumes.
RECORDED = dict.fromkeys(options.options(fields.RECORDED), 1) | {"train_dir": "run"}
WAIT = logs.wait_for_later_second  # Which other tests do without.


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """Event files are numbered per process; every run is a process of its own."""
    number = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", number)


@contextlib.contextmanager
def logging(folder, resumed_step=0):
    board = TensorBoard(folder, Timer())
    board.on_start(Run(resumed_step, folder, RECORDED, None))
    yield board
    board.on_end(0, "finished")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def curve(accumulator, tag="total_loss"):
    return [(step, float(value)) for step, value in tensors(accumulator, tag)]


def plugin(accumulator, tag):
    return accumulator.SummaryMetadata(tag).plugin_data.plugin_name


def lines(folder):
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    times = ("time", "seconds")
    return [{k: of for k, of in entry.items() if k not in times} for entry in entries]


# What is written.


def test_scalars_reach_both_files_during_the_run(tmp_path):
    """JSON has no NaN, and event files have float32 alone."""
    with logging(tmp_path) as board:
        board.on_log(10, {"total_loss": 4.5, "rate": math.nan, "large": 1e39})
        board.on_log(20, {"total_loss": 3.5, "rate": 0.0, "large": 1.0})

        events = read(tmp_path / "train")
        assert plugin(events, "total_loss") == "scalars"
        assert curve(events) == [(10, 4.5), (20, 3.5)]
        assert curve(events, "rate") == [(20, 0.0)]
        assert curve(events, "large") == [(20, 1.0)]
        assert lines(tmp_path) == [
            {"step": 10, "total_loss": 4.5, "rate": None, "large": 1e39},
            {"step": 20, "total_loss": 3.5, "rate": 0.0, "large": 1.0},
        ]


def test_histograms_count_every_finite_value(tmp_path):
    value = tf.constant([-1.0, 1.0, 1.0, math.inf, math.nan])
    with logging(tmp_path) as board:
        board.on_summary(100, summary(**{"gradients/conv1/kernel": value}))
    events = read(tmp_path / "train")
    assert plugin(events, "gradients/conv1/kernel") == "histograms"
    [(step, buckets)] = tensors(events, "gradients/conv1/kernel")
    assert step == 100
    left, right, counts = buckets.T
    assert (left[0], right[-1], counts.sum()) == (-1.0, 1.0, 3)


def test_the_share_of_zeros_is_written_for_each_layer(tmp_path):
    active = {"conv1": np.array([0.0, 0.0, 0.0, 1.0]), "local3": np.array([2.0, 0.0])}
    with logging(tmp_path) as board:
        board.on_summary(100, summary()._replace(activations=active))
    events = read(tmp_path / "train")
    found = {name: curve(events, f"sparsity/{name}") for name in active}
    assert found == {"conv1": [(100, 0.75)], "local3": [(100, 0.5)]}


# Resuming.


def write_curve(folder, steps, value, resumed_step=0):
    with logging(folder, resumed_step) as board:
        for step in steps:
            board.on_log(step, {"total_loss": value})


@pytest.mark.parametrize("resumed_step", [0, 50])
def test_both_logs_hold_one_curve_after_a_restart(tmp_path, resumed_step):
    write_curve(tmp_path, range(10, 71, 10), 1.0)
    for value in (2.0, 3.0):
        write_curve(tmp_path, (60, 70, 80), value, resumed_step)
    kept = [(step, 1.0) for step in range(10, resumed_step + 1, 10)]
    expected = [*kept, (60, 3.0), (70, 3.0), (80, 3.0)]
    assert curve(read_as_the_server(tmp_path / "train")) == expected
    assert [(line["step"], line["total_loss"]) for line in lines(tmp_path)] == expected
    assert names(tmp_path) == ["metrics.jsonl", "train"]


def test_a_torn_last_line_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 10}\n'
    for torn in (b'{"step": 50, "tot', b"\0\0\xff", b'{"step": 20}'):
        path.write_bytes(whole + torn)
        write_curve(tmp_path, (60,), 2.0, resumed_step=50)
        assert [line["step"] for line in lines(tmp_path)] == [10, 60]


def test_a_log_continues_in_a_new_file_after_it_is_moved_away(tmp_path):
    """As by logrotate, and without a signal."""
    rotated = tmp_path / "metrics.jsonl.1"
    for resumed_step in (0, 30):  # In one process, and between two.
        with logging(tmp_path, resumed_step) as board:
            for step in range(resumed_step + 10, resumed_step + 31, 10):
                board.on_log(step, {"total_loss": 1.0})
                if step == 10:
                    (tmp_path / "metrics.jsonl").rename(rotated)
                    events = logs.intact(
                        logs.read_lines(tmp_path / "metrics.jsonl"), EVENT
                    )
                    assert events == logs.read_steps(tmp_path / "metrics.jsonl") == []
        if not resumed_step:
            assert [line["step"] for line in lines(tmp_path)] == [20, 30]
            (tmp_path / "metrics.jsonl").unlink()
    assert [line["step"] for line in lines(tmp_path)] == [40, 50, 60]
    assert [line["step"] for line in logs.read_steps(rotated)] == [10]


def test_events_are_dropped_with_their_steps_and_readers_of_metrics_pass_them_over(
    tmp_path,
):
    log = tmp_path / "metrics.jsonl"
    write_curve(tmp_path, (10, 20), 1.0)
    for step in (15, 20, 25):
        event = {"step": step, "time": 1e9, "event": "skip", "what": "nan"}
        logs.append_line(log, event)
    before = logs.lines_up_to(log, 20, events=False)
    write_curve(tmp_path, (30,), 1.0, resumed_step=20)
    assert [line["step"] for line in logs.read_steps(log)] == [10, 20, 30]
    assert [event["step"] for event in logs.intact(logs.read_lines(log), EVENT)] == [
        15,
        20,
    ]
    assert logs.lines_up_to(log, 20, events=False) == before
    # A stranger's event need not be one.
    for odd in ({"event": "x"}, {"step": 5, "event": 7}, {**event, "what": ["a"]}):
        logs.append_line(log, odd)
    assert len(logs.intact(logs.read_lines(log), EVENT)) == 2
    assert [line["step"] for line in logs.read_steps(log)] == [10, 20, 30]


def test_the_resume_mark_is_read_after_the_old_events(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "wait_for_later_second", WAIT)
    write_curve(tmp_path, (10, 20), 1.0)
    write_curve(tmp_path, (20,), 2.0, resumed_step=10)
    _, mark, _ = names(tmp_path / "train")
    assert mark.endswith(".resume")
    assert curve(read_as_the_server(tmp_path / "train")) == [(10, 1.0), (20, 2.0)]


def test_curves_make_no_new_directory(tmp_path, capsys):
    """Their own may be elsewhere for a while."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    with logging(run) as board:
        board.on_log(10, {"loss": 1.0})
        run.rename(moved)
        board.on_log(20, {"loss": 2.0})
        assert not run.exists()
        moved.rename(run)
        board.on_log(40, {"loss": 4.0})
    assert [line["step"] for line in lines(run)] == [10, 40]
    assert len(capsys.readouterr().err.splitlines()) == 1


# Disks that cannot take it.


NO_SPACE = os.strerror(errno.ENOSPC)


class SmallFile(io.FileIO):
    """Takes some bytes without an error, as a disk does that is nearly full."""

    size = 250

    def write(self, data):
        room = max(0, self.size - self.tell())
        if not room:
            raise OSError(errno.ENOSPC, NO_SPACE)
        return super().write(data[:room])


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    file = tmp_path / "metrics.jsonl"
    with logging(tmp_path) as board:
        small = types.SimpleNamespace(opened=lambda *_, **__: SmallFile(file, "a+"))
        monkeypatch.setattr("cifar10.run_directory.logs.files.opened", small.opened)
        for step in (10, 20, 30):  # There is room for a line and a half.
            board.on_log(step, {"total_loss": 4.5})
        assert lines(tmp_path) == [{"step": 10, "total_loss": 4.5}]

        monkeypatch.setattr(SmallFile, "size", 10_000)
        board.on_log(40, {"total_loss": 4.5})

    assert [line["step"] for line in lines(tmp_path)] == [10, 40]
    lost, *_ = capsys.readouterr().err.splitlines()
    assert NO_SPACE in lost


# Evaluation.


@needs_full
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_full_disk_under_the_events_is_a_warning(tmp_path, write, capsys):
    with logging(tmp_path) as board:
        [events] = (tmp_path / "train").iterdir()
        fill_disk(events)
        write(board)
    assert NO_SPACE in capsys.readouterr().err
