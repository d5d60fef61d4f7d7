"""Event files and metrics.jsonl, read back as TensorBoard and scripts read them."""

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
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from cifar10.errors import UsageError
from cifar10.run_directory import event_files, scores
from cifar10.scoring.summaries import EvaluationSummaries
from cifar10.training import histograms
from cifar10.training.summaries import TrainSummaries
from event_readers import read, read_as_the_server, tensors

WAIT = event_files.wait_for_later_second  # Which other tests do without.


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """Event files are numbered per process; every run is a process of its own."""
    number = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", number)


def train_summaries(folder, resumed_step=0):
    return TrainSummaries(folder / "train", folder / "metrics.jsonl", resumed_step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def curve(accumulator, tag="total_loss"):
    return [(step, float(value)) for step, value in tensors(accumulator, tag)]


def plugin(accumulator, tag):
    return accumulator.SummaryMetadata(tag).plugin_data.plugin_name


def lines(folder):
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# What is written.


def test_scalars_reach_both_files_while_the_training_runs(tmp_path):
    """JSON has no NaN, and event files have float32 alone."""
    with train_summaries(tmp_path) as summaries:
        summaries.scalars(10, {"total_loss": 4.5, "rate": math.nan, "large": 1e39})
        summaries.scalars(20, {"total_loss": 3.5, "rate": 0.0, "large": 1.0})
        summaries.flush()

        events = read(tmp_path / "train")
        assert plugin(events, "total_loss") == "scalars"
        assert curve(events) == [(10, 4.5), (20, 3.5)]
        assert curve(events, "rate") == [(20, 0.0)]
        assert curve(events, "large") == [(20, 1.0)]
        assert lines(tmp_path) == [
            {"step": 10, "total_loss": 4.5, "rate": None, "large": 1e39},
            {"step": 20, "total_loss": 3.5, "rate": 0.0, "large": 1.0},
        ]


def test_histograms_count_every_value(tmp_path):
    values = {
        "variables/conv1/kernel": tf.constant([[1.0, 2.0], [3.0, 3.0]]),
        "gradients/conv1/kernel": tf.constant([-1.0, 1.0, 1.0]),
    }
    with train_summaries(tmp_path) as summaries:
        summaries.histograms(100, values)

    events = read(tmp_path / "train")
    assert set(events.Tags()["tensors"]) == set(values)
    for tag, value in values.items():
        assert plugin(events, tag) == "histograms"
        [(step, buckets)] = tensors(events, tag)  # left, right, count
        assert step == 100
        assert buckets[:, 2].sum() == tf.size(value)
        assert buckets[0, 0] == np.min(value)
        assert buckets[-1, 1] == np.max(value)


def test_histogram_of_a_large_tensor_is_of_values_from_all_of_it(tmp_path):
    """Counting every value of an activation would take TensorBoard a gigabyte."""
    ramp = tf.reshape(tf.linspace(0.0, 1.0, 512 * 512), [512, 512])
    with train_summaries(tmp_path) as summaries:
        summaries.histograms(100, {"activations/conv1": ramp})

    [(_, buckets)] = tensors(read(tmp_path / "train"), "activations/conv1")
    counts = buckets[:, 2]
    assert 2**15 < counts.sum() <= 2**16
    assert buckets[0, 0] == 0.0
    assert buckets[-1, 1] == pytest.approx(1.0, abs=1e-4)
    assert np.ptp(counts) < 0.01 * counts.mean(), "one part of it counts for more"

    channels = tf.broadcast_to(tf.range(96.0), [17, 24, 24, 96])
    values, counts = np.unique(histograms.sample(channels), return_counts=True)
    np.testing.assert_array_equal(values, np.arange(96))
    assert np.ptp(counts) <= 1


def test_buckets_are_tensorboards_own_and_finite():
    random = np.random.default_rng(0)
    for values in (random.normal(size=1000), np.full(7, 0.25), np.float32([1, 2])):
        expected = tensor_util.make_ndarray(histogram_pb("", values).value[0].tensor)
        np.testing.assert_allclose(histograms.buckets(values), expected)
    odd = np.array([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(
        histograms.buckets(np.array([1.0, *odd, 2.0])),
        histograms.buckets(np.array([1.0, 2.0])),
    )
    assert not histograms.buckets(odd)[:, 2].any()


def test_activations_have_histogram_and_share_of_zeros(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.activations(100, {"conv1": np.array([0.0, 0.0, 0.0, 7.0])})

    events = read(tmp_path / "train")
    assert set(events.Tags()["tensors"]) == {"activations/conv1", "sparsity/conv1"}
    assert plugin(events, "activations/conv1") == "histograms"
    assert curve(events, "sparsity/conv1") == [(100, 0.75)]


def decoded(image_event):
    """Width, height and pixels of an image event, 0 to 255."""
    _step, (width, height, *pngs) = image_event
    return int(width), int(height), [tf.io.decode_png(png).numpy() for png in pngs]


def test_eight_images_are_stretched_each_to_the_whole_range(tmp_path):
    ramp = np.linspace(0, 1, 4 * 6 * 3).reshape(4, 6, 3)
    flat = np.full_like(ramp, 3.0)
    images = np.stack([ramp - 0.5, 100 * ramp, *[flat] * 18])

    with train_summaries(tmp_path) as summaries:
        summaries.images(100, tf.constant(images, tf.float16))

    [event] = tensors(read(tmp_path / "train"), "distorted_images")
    width, height, shown = decoded(event)
    assert (event[0], width, height, len(shown)) == (100, 6, 4, 8)
    np.testing.assert_allclose(shown[0], ramp * 255, atol=1)
    np.testing.assert_allclose(shown[1], ramp * 255, atol=1)
    np.testing.assert_array_equal(shown[2], 0)  # Nothing to stretch, and no NaN.


# Resuming.


def write_curve(folder, steps, value, resumed_step=0):
    with train_summaries(folder, resumed_step) as summaries:
        for step in steps:
            summaries.scalars(step, {"total_loss": value})


@pytest.mark.parametrize("resumed_step", [0, 50])
def test_both_are_one_curve_after_a_resume_or_a_start_without_checkpoint(
    tmp_path, resumed_step
):
    write_curve(tmp_path, range(10, 71, 10), 1.0)
    for value in (2.0, 3.0):
        write_curve(tmp_path, (60, 70, 80), value, resumed_step)
    kept = [(step, 1.0) for step in range(10, resumed_step + 1, 10)]
    expected = [*kept, (60, 3.0), (70, 3.0), (80, 3.0)]
    assert curve(read_as_the_server(tmp_path / "train")) == expected
    assert [(line["step"], line["total_loss"]) for line in lines(tmp_path)] == expected
    assert names(tmp_path) == ["metrics.jsonl", "train"]


def test_torn_last_line_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 10}\n'
    for torn in (b'{"step": 50, "tot', b"5", b"\0\0\0", b"\xff\xfe", b'{"step": 20}'):
        path.write_bytes(whole + torn)
        write_curve(tmp_path, (60,), 2.0, resumed_step=50)
        assert [line["step"] for line in lines(tmp_path)] == [10, 60]


def test_resume_waits_until_its_mark_is_read_after_the_old_events(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(event_files, "wait_for_later_second", WAIT)
    write_curve(tmp_path, (10, 20), 1.0)
    write_curve(tmp_path, (20,), 2.0, resumed_step=10)
    _, mark, _ = names(tmp_path / "train")
    assert mark.endswith(".resume")
    assert curve(read_as_the_server(tmp_path / "train")) == [(10, 1.0), (20, 2.0)]


def test_curves_go_to_no_other_directory(tmp_path, capsys):
    """Where its own was, another training may have begun by now."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    with train_summaries(run) as summaries:
        summaries.scalars(10, {"loss": 1.0})
        run.rename(moved)
        summaries.scalars(20, {"loss": 2.0})
        assert not run.exists()
        run.mkdir()
        (run / "metrics.jsonl").write_text("another run's\n")
        summaries.scalars(30, {"loss": 3.0})
        summaries.flush()
        (run / "metrics.jsonl").unlink()
        run.rmdir()
        moved.rename(run)
        summaries.scalars(40, {"loss": 4.0})
    assert [line["step"] for line in lines(run)] == [10, 40]
    assert len(capsys.readouterr().err.splitlines()) == 2  # Lost, and written again.


# Disks that cannot take it.


def fill_disk(path):
    """Makes every further write to an open file fail as on a full disk."""
    for link in Path("/proc/self/fd").iterdir():
        # The folder's own descriptor is closed once it is listed.
        if link.is_symlink() and link.readlink() == path:
            with open("/dev/full", "wb") as full:  # noqa: PTH123 - as a descriptor.
                os.dup2(full.fileno(), int(link.name))
            return
    raise AssertionError(f"{path} is not open")


NO_SPACE = os.strerror(errno.ENOSPC)
needs_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="/dev/full is of Linux only"
)


class SmallFile(io.FileIO):
    """Takes some bytes without an error, as a disk does that is nearly full."""

    size = 60

    def write(self, data):
        room = max(0, self.size - self.tell())
        if not room:
            raise OSError(errno.ENOSPC, NO_SPACE)
        return super().write(data[:room])


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    file = tmp_path / "metrics.jsonl"
    with train_summaries(tmp_path) as summaries:
        small = types.SimpleNamespace(opened=lambda *_, **__: SmallFile(file, "a"))
        monkeypatch.setattr("cifar10.training.summaries.regular_files", small)
        for step in (10, 20, 30):  # There is room for a line and a half.
            summaries.scalars(step, {"total_loss": 4.5})
        assert lines(tmp_path) == [{"step": 10, "total_loss": 4.5}]

        monkeypatch.setattr(SmallFile, "size", 1000)
        summaries.scalars(40, {"total_loss": 4.5})

    assert [line["step"] for line in lines(tmp_path)] == [10, 40]
    lost, *_ = capsys.readouterr().err.splitlines()
    assert NO_SPACE in lost


WRITES = {
    "scalars": lambda summaries: summaries.scalars(10, {"total_loss": 4.5}),
    "histograms": lambda summaries: summaries.histograms(10, {"w": tf.ones([3])}),
    "activations": lambda summaries: summaries.activations(10, {"a": np.ones([3])}),
    "images": lambda summaries: summaries.images(10, tf.ones([1, 2, 2, 3])),
}


@needs_full
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_full_disk_under_the_events_is_a_warning(tmp_path, write, capsys):
    with train_summaries(tmp_path) as summaries:
        [events] = (tmp_path / "train").iterdir()
        fill_disk(events)
        write(summaries)
    assert NO_SPACE in capsys.readouterr().err


@needs_full
def test_full_disk_under_an_evaluation_is_a_usage_error(tmp_path):
    summaries = EvaluationSummaries(tmp_path)
    [events] = tmp_path.iterdir()
    fill_disk(events)
    with pytest.raises(UsageError, match=NO_SPACE):
        summaries.write(70, {"total_loss": 0.5}, np.eye(2, dtype=np.int64), "")


@pytest.mark.parametrize("blocked", ["train", "metrics.jsonl"])
@pytest.mark.parametrize("resumed_step", [0, 50])
def test_place_that_cannot_be_written_costs_the_curves_until_it_can(
    tmp_path, blocked, resumed_step, capsys
):
    write_curve(tmp_path, (10, 60), 1.0)
    place, aside = tmp_path / blocked, tmp_path / "aside"
    place.rename(aside)
    # A file where the folder should be, or the other way round.
    place.touch() if blocked == "train" else place.mkdir()

    with train_summaries(tmp_path, resumed_step) as summaries:
        assert "directory" in capsys.readouterr().err
        summaries.scalars(70, {"total_loss": 2.0})
        assert capsys.readouterr().err == "", "it is told once"
        place.unlink() if blocked == "train" else place.rmdir()
        aside.rename(place)
        summaries.scalars(80, {"total_loss": 3.0})
    assert capsys.readouterr().err
    kept = [step for step in (10, 60) if step <= resumed_step]
    assert [line["step"] for line in lines(tmp_path)] == [*kept, 80]


# Evaluation.


def test_evaluation_writes_scalars_matrix_and_notes_at_the_checkpoints_step(tmp_path):
    confusion = np.array([[3, 1], [0, 0]])  # No image is of the second class.

    summaries = EvaluationSummaries(tmp_path / "eval")
    for step, loss in ((50, 1.5), (70, 0.5)):
        scalars = {"total_loss": loss, "precision @ 1": 0.75}
        summaries.write(step, scalars, confusion, "Notes.")

    events = read(tmp_path / "eval")
    assert curve(events) == [(50, 1.5), (70, 0.5)]
    assert curve(events, "precision @ 1") == [(50, 0.75), (70, 0.75)]
    assert scores.read(tmp_path / "eval") == {50: 0.75, 70: 0.75}
    _, (step, notes) = tensors(events, "evaluation")
    assert (step, notes.item()) == (70, b"Notes.")
    assert plugin(events, "confusion_matrix") == "images"
    _, event = tensors(events, "confusion_matrix")
    width, height, [picture] = decoded(event)
    assert (event[0], width, height) == (70, 320, 320)
    # One shade per entry, the darker the larger its share of the true class.
    shades = picture[::160, ::160, 0]
    np.testing.assert_allclose(shades, [[64, 191], [255, 255]], atol=1)
    assert np.all(picture[:160, 160:] == picture[0, 160])


@pytest.mark.parametrize("below", [".", "deeper"])
def test_evaluation_folder_that_cannot_be_made_is_a_usage_error(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--eval_dir"):
        EvaluationSummaries(tmp_path / "file" / below)
