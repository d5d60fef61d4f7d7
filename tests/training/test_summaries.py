"""Event files and metrics.jsonl, read back as TensorBoard and scripts read them."""

import errno
import io
import json
import math
import os
import re
import time
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import (
    event_accumulator,
    plugin_event_accumulator,
    tag_types,
)
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from cifar10.errors import UsageError
from cifar10.run_directory import scores
from cifar10.scoring.summaries import EvaluationSummaries
from cifar10.towers import readout
from cifar10.towers.towers import StepResult
from cifar10.training import histograms
from cifar10.training.results import Results
from cifar10.training.summaries import TrainSummaries

# What the TensorBoard server reads with; the other one does not take back tensors.
ServerAccumulator = plugin_event_accumulator.EventAccumulator


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """Event files are numbered per process; every run is a process of its own."""
    number = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", number)


def train_summaries(folder, resumed_step=0):
    return TrainSummaries(folder / "train", folder / "metrics.jsonl", resumed_step)


def test_what_a_training_logs_goes_to_no_other_directory(tmp_path, capsys):
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
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 40]
    said = capsys.readouterr().err
    assert said.count("cannot be written") == said.count("are written again") == 1


def read(events):
    """Everything in a folder of event files."""
    accumulator = event_accumulator.EventAccumulator(
        str(events), size_guidance={event_accumulator.TENSORS: 0}
    )
    return accumulator.Reload()


def read_as_the_server(events):
    accumulator = ServerAccumulator(str(events), size_guidance={tag_types.TENSORS: 0})
    accumulator.Reload()
    return accumulator


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def tensors(accumulator, tag):
    """(step, value) of all events of a tag."""
    return [
        (event.step, tf.make_ndarray(event.tensor_proto))
        for event in accumulator.Tensors(tag)
    ]


def curve(accumulator, tag="total_loss"):
    return [(step, float(value)) for step, value in tensors(accumulator, tag)]


def plugin(accumulator, tag):
    return accumulator.SummaryMetadata(tag).plugin_data.plugin_name


def lines(folder):
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# What is written.


def test_scalars_reach_both_files(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.scalars(10, {"total_loss": 4.5, "learning_rate": 0.25})
        summaries.scalars(20, {"total_loss": 3.5, "learning_rate": 0.125})

    events = read(tmp_path / "train")
    assert set(events.Tags()["tensors"]) == {"total_loss", "learning_rate"}
    assert plugin(events, "total_loss") == "scalars"
    assert curve(events) == [(10, 4.5), (20, 3.5)]
    assert curve(events, "learning_rate") == [(10, 0.25), (20, 0.125)]
    assert lines(tmp_path) == [
        {"step": 10, "total_loss": 4.5, "learning_rate": 0.25},
        {"step": 20, "total_loss": 3.5, "learning_rate": 0.125},
    ]


def test_value_that_is_not_finite_is_null_in_lines_and_absent_in_events(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.scalars(10, {"total_loss": 4.5, "examples_per_sec": math.nan})
        summaries.scalars(20, {"total_loss": 3.5, "examples_per_sec": 0.0})

    assert [line["examples_per_sec"] for line in lines(tmp_path)] == [None, 0.0]
    assert curve(read(tmp_path / "train"), "examples_per_sec") == [(20, 0.0)]


def test_a_number_beyond_float32_is_in_lines_alone(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.scalars(10, {"total_loss": 1e39})
        summaries.scalars(20, {"total_loss": 3.5})

    assert [line["total_loss"] for line in lines(tmp_path)] == [1e39, 3.5]
    assert curve(read(tmp_path / "train")) == [(20, 3.5)]


def test_both_can_be_read_while_the_training_runs(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.scalars(10, {"total_loss": 4.5})
        summaries.flush()

        assert lines(tmp_path) == [{"step": 10, "total_loss": 4.5}]
        assert curve(read(tmp_path / "train")) == [(10, 4.5)]


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


@pytest.mark.parametrize("side", [512, 1500])
def test_histogram_of_a_large_tensor_is_of_values_from_all_of_it(tmp_path, side):
    """Counting every value of an activation would take TensorBoard a gigabyte."""
    ramp = tf.reshape(tf.linspace(0.0, 1.0, side * side), [side, side])
    with train_summaries(tmp_path) as summaries:
        summaries.histograms(100, {"activations/conv1": ramp})

    [(_, buckets)] = tensors(read(tmp_path / "train"), "activations/conv1")
    counts = buckets[:, 2]
    assert 2**15 < counts.sum() <= 2**16
    assert buckets[0, 0] == 0.0
    assert buckets[-1, 1] == pytest.approx(1.0, abs=1e-4)
    assert np.ptp(counts) < 0.01 * counts.mean(), "one part of it counts for more"


def test_histogram_of_a_large_activation_is_of_all_channels():
    channels = tf.broadcast_to(tf.range(96.0), [17, 24, 24, 96])
    values, counts = np.unique(histograms.sample(channels), return_counts=True)
    np.testing.assert_array_equal(values, np.arange(96))
    assert np.ptp(counts) <= 1


def test_buckets_are_tensorboards_own():
    random = np.random.default_rng(0)
    for values in (random.normal(size=1000), np.full(7, 0.25), np.float32([1, 2])):
        expected = tensor_util.make_ndarray(histogram_pb("", values).value[0].tensor)
        np.testing.assert_allclose(histograms.buckets(values), expected)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_buckets_leave_out_what_is_not_finite(odd):
    values = np.array([1.0, odd, 2.0, odd], np.float32)
    np.testing.assert_array_equal(
        histograms.buckets(values), histograms.buckets(np.array([1.0, 2.0]))
    )
    assert not histograms.buckets(np.array([odd]))[:, 2].any()


def test_activations_have_histogram_and_share_of_zeros(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.activations(100, {"conv1": np.array([0.0, 0.0, 0.0, 7.0])})

    events = read(tmp_path / "train")
    assert set(events.Tags()["tensors"]) == {"activations/conv1", "sparsity/conv1"}
    assert plugin(events, "activations/conv1") == "histograms"
    assert plugin(events, "sparsity/conv1") == "scalars"
    assert curve(events, "sparsity/conv1") == [(100, 0.75)]


def decoded(image_event):
    """Width, height and pixels of an image event, 0 to 255."""
    _step, (width, height, *pngs) = image_event
    return int(width), int(height), [tf.io.decode_png(png).numpy() for png in pngs]


def test_each_image_is_stretched_to_the_whole_range_by_itself(tmp_path):
    ramp = np.linspace(0, 1, 4 * 6 * 3).reshape(4, 6, 3)
    images = np.stack([ramp - 0.5, 100 * ramp, np.full_like(ramp, 3.0)])

    with train_summaries(tmp_path) as summaries:
        summaries.images(100, tf.constant(images, tf.float16))

    events = read(tmp_path / "train")
    assert plugin(events, "distorted_images") == "images"
    [event] = tensors(events, "distorted_images")
    width, height, (centred, scaled, flat) = decoded(event)
    assert (event[0], width, height) == (100, 6, 4)
    expected = ramp * 255
    np.testing.assert_allclose(centred, expected, atol=1)
    np.testing.assert_allclose(scaled, expected, atol=1)
    np.testing.assert_array_equal(flat, 0)  # Nothing to stretch, and no NaN.


def test_eight_images_of_a_large_batch_are_shown(tmp_path):
    with train_summaries(tmp_path) as summaries:
        summaries.images(100, tf.random.stateless_normal([20, 4, 4, 3], (1, 2)))

    [event] = tensors(read(tmp_path / "train"), "distorted_images")
    assert len(decoded(event)[2]) == 8


def test_describe_writes_configuration_graph_and_hyperparameters(tmp_path):
    settings = {
        "model": "cnn",
        "learning_rate": 0.1,
        "fresh": False,
        "num_gpus": None,
        "versions": {"keras": "3.15.1"},
        "train_dir": "/tmp/run",  # noqa: S108 - only a text here.
    }
    graph = tf.function(lambda x: tf.add(x, 1.0, name="the_step"))
    graph = graph.get_concrete_function(tf.TensorSpec([], tf.float32)).graph

    with train_summaries(tmp_path) as summaries:
        summaries.describe(settings, ["model", "learning_rate"])
        summaries.graph(graph)

    events = read(tmp_path / "train")
    [(step, text)] = tensors(events, "config")
    assert plugin(events, "config") == "text"
    assert step == 0
    rows = text.item().decode().splitlines()
    assert rows[:3] == ["| setting | value |", "| --- | --- |", "| model | cnn |"]
    assert len(rows) == 2 + len(settings)
    assert "the_step" in {node.name for node in events.Graph().node}
    tag = "_hparams_/session_start_info"
    content = events.SummaryMetadata(tag).plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert set(info.hparams) == {"model", "learning_rate"}
    assert info.hparams["learning_rate"].number_value == 0.1


# Resuming.


def write_curve(folder, steps, value, resumed_step=0):
    with train_summaries(folder, resumed_step) as summaries:
        for step in steps:
            summaries.scalars(step, {"total_loss": value})


def let_time_pass(folder, seconds=10):
    """Makes the event files older; their names begin with the second they began in."""
    for path in list((folder / "train").iterdir()):
        # events.out.tfevents.SECOND.host.process.number.v2
        *head, second, tail = path.name.split(".", 4)
        name = ".".join([*head, str(int(second) - seconds), tail])
        path.rename(path.with_name(name))


ONE_CURVE = [(step, 1.0) for step in range(10, 51, 10)] + [
    (60, 2.0),
    (70, 2.0),
    (80, 2.0),
]


def resumed_run(folder):
    write_curve(folder, range(10, 71, 10), 1.0)
    let_time_pass(folder)
    write_curve(folder, (60, 70, 80), 2.0, resumed_step=50)


def test_curve_is_one_after_a_resume(tmp_path):
    resumed_run(tmp_path)

    assert curve(read_as_the_server(tmp_path / "train")) == ONE_CURVE


def test_curve_is_one_after_a_restart_without_checkpoint(tmp_path):
    write_curve(tmp_path, (10, 20, 30), 1.0)
    let_time_pass(tmp_path)
    write_curve(tmp_path, (10, 20), 2.0)

    events = read_as_the_server(tmp_path / "train")
    assert curve(events) == [(10, 2.0), (20, 2.0)]


def test_lines_are_one_curve_after_a_resume(tmp_path):
    resumed_run(tmp_path)

    assert [(line["step"], line["total_loss"]) for line in lines(tmp_path)] == ONE_CURVE


def test_lines_are_one_curve_after_a_restart_without_checkpoint(tmp_path):
    write_curve(tmp_path, (10, 20, 30), 1.0)
    write_curve(tmp_path, (10, 20), 2.0)

    assert lines(tmp_path) == [
        {"step": 10, "total_loss": 2.0},
        {"step": 20, "total_loss": 2.0},
    ]


def test_second_resume_takes_back_nothing_more_and_leaves_no_other_file(tmp_path):
    write_curve(tmp_path, range(10, 71, 10), 1.0)

    for _ in range(2):
        write_curve(tmp_path, (), 2.0, resumed_step=50)
        assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 40, 50]
    assert names(tmp_path) == ["metrics.jsonl", "train"]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 50, "tot',
        b"{",
        b"5",
        b'{"total_loss": 1.0}',
        b"\0\0\0\0",
        b"\xff\xfe",
    ],
)
def test_torn_last_line_is_taken_back(tmp_path, torn):
    write_curve(tmp_path, (10, 20), 1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)

    write_curve(tmp_path, (60,), 2.0, resumed_step=50)

    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 60]


def test_last_line_that_lost_only_its_newline_does_not_spoil_the_next(tmp_path):
    write_curve(tmp_path, (10, 20), 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))

    write_curve(tmp_path, (60,), 2.0, resumed_step=50)

    assert lines(tmp_path)[-1] == {"step": 60, "total_loss": 2.0}


def test_resume_mark_is_read_after_the_old_events_and_before_the_new(tmp_path):
    write_curve(tmp_path, (10,), 1.0)
    let_time_pass(tmp_path)
    [old] = names(tmp_path / "train")
    while time.time() % 1 > 0.5:  # The mark and the new file in one second.
        time.sleep(0.05)
    write_curve(tmp_path, (20,), 2.0, resumed_step=10)

    first, mark, new = names(tmp_path / "train")

    assert first == old
    assert mark.endswith(".resume")
    assert new.endswith(".v2")


def test_resume_mark_follows_old_events_of_the_same_second(tmp_path):
    while time.time() % 1 > 0.3:  # So that the old events and the resume share one.
        time.sleep(0.05)
    write_curve(tmp_path, (10, 20), 1.0)
    write_curve(tmp_path, (20,), 2.0, resumed_step=10)

    _, mark, _ = names(tmp_path / "train")

    assert mark.endswith(".resume")
    assert curve(read_as_the_server(tmp_path / "train")) == [(10, 1.0), (20, 2.0)]


def test_new_run_has_no_resume_mark(tmp_path):
    write_curve(tmp_path, (10,), 1.0)

    assert [name[-3:] for name in names(tmp_path / "train")] == [".v2"]


# Disks that cannot take it.


GO_ON = "then give the same command again, without --fresh"
ELSEWHERE = "or name another place with --eval_dir"


def unwritable(directory, reason, fix=GO_ON):
    """A pattern for the whole message; `reason` may have the file's path before it."""
    return (
        rf"^The event files and logs in {re.escape(str(directory))} cannot be written: "
        rf"[^\n]*{reason}[^\n]*\. Make room there or make it writable, {fix}\.$"
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


NO_SPACE = "No space left on device"
needs_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="/dev/full is of Linux only"
)


def lost(directory, reason):
    """A pattern for the whole warning."""
    error = unwritable(directory, reason).partition(" Make room")[0]
    return f"{error} The training continues; what it logs meanwhile is lost\\.\n$"


@needs_full
def test_full_disk_under_the_lines_is_a_warning(tmp_path, capsys, monkeypatch):
    def opened(_, mode, **how):
        return Path("/dev/full").open(mode, **how)

    full = types.SimpleNamespace(opened=opened)
    with train_summaries(tmp_path) as summaries:
        monkeypatch.setattr("cifar10.training.summaries.regular_files", full)
        summaries.scalars(10, {"total_loss": 4.5})
    assert re.match(lost(tmp_path, NO_SPACE), capsys.readouterr().err)


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
    said = capsys.readouterr().err.splitlines()
    assert "No space left on device. The training continues" in said[0]
    assert said[-1].endswith("are written again.")


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
    said = capsys.readouterr().err.splitlines(keepends=True)  # Activations write twice.
    assert re.match(lost(tmp_path, NO_SPACE), said[0])


@needs_full
def test_full_disk_under_an_evaluation_is_a_usage_error(tmp_path):
    summaries = EvaluationSummaries(tmp_path)
    [events] = tmp_path.iterdir()
    fill_disk(events)

    with pytest.raises(UsageError, match=unwritable(tmp_path, NO_SPACE, ELSEWHERE)):
        summaries.write(70, {"total_loss": 0.5}, np.eye(2, dtype=np.int64), "")


@pytest.mark.parametrize("blocked", ["train", "metrics.jsonl"])
@pytest.mark.parametrize("resumed_step", [0, 50])
def test_place_that_cannot_be_written_costs_what_is_logged_until_it_can(
    tmp_path, blocked, resumed_step, capsys
):
    write_curve(tmp_path, (10, 60), 1.0)
    place, aside = tmp_path / blocked, tmp_path / "aside"
    place.rename(aside)
    if blocked == "train":
        place.touch()  # A file where the folder should be.
        reason = "[Nn]ot a directory"
    else:
        place.mkdir()
        reason = "Is a directory"

    with train_summaries(tmp_path, resumed_step) as summaries:
        assert re.match(lost(tmp_path, reason), capsys.readouterr().err)
        summaries.scalars(70, {"total_loss": 2.0})
        assert capsys.readouterr().err == "", "it is told once"
        place.unlink() if blocked == "train" else place.rmdir()
        aside.rename(place)
        summaries.scalars(80, {"total_loss": 3.0})
    assert capsys.readouterr().err.endswith("are written again.\n")
    kept = [step for step in (10, 60) if step <= resumed_step]
    assert [line["step"] for line in lines(tmp_path)] == [*kept, 80]


# Averages of the losses.


def losses(total_loss, cross_entropy, weight_decay):
    return {
        "precision @ 1": 0.5,
        "total_loss": total_loss,
        "cross_entropy": cross_entropy,
        "weight_decay": weight_decay,
    }


def look_at_step(results, values):
    scalars = {**values, "gradient_norm": 1.0}
    metrics = {name: tf.constant(value) for name, value in scalars.items()}
    tower_losses = tf.constant([values["total_loss"]])
    numbers = readout.join(metrics, tower_losses)
    results.add(1, StepResult(metrics, tower_losses, {}, numbers))
    results.read()


def test_first_loss_starts_the_average_and_later_ones_weigh_a_tenth():
    results = Results(["/CPU:0"])
    look_at_step(results, losses(4.0, 3.0, 1.0))
    assert results.loss_averages == pytest.approx(losses(4.0, 3.0, 1.0))

    look_at_step(results, losses(2.0, 0.0, 2.0))
    assert results.loss_averages == pytest.approx(losses(3.8, 2.7, 1.1))

    look_at_step(results, losses(0.0, -1.1, 1.1))
    assert results.loss_averages == pytest.approx(losses(3.42, 2.32, 1.1))


def test_averages_go_on_from_a_checkpoint_without_changing_it():
    saved = losses(4.0, 3.0, 1.0)
    results = Results(["/CPU:0"])
    results.loss_averages.update(saved)  # As `training` does when it resumes.
    look_at_step(results, losses(2.0, 0.0, 2.0))

    assert results.loss_averages == pytest.approx(losses(3.8, 2.7, 1.1))
    assert saved == losses(4.0, 3.0, 1.0)


# Evaluation.


def test_evaluation_writes_scalars_matrix_and_notes_at_the_checkpoints_step(tmp_path):
    confusion = np.array([[3, 1], [0, 0]])  # No image is of the second class.

    summaries = EvaluationSummaries(tmp_path / "eval")
    summaries.write(70, {"total_loss": 0.5, "precision @ 1": 0.75}, confusion, "Notes.")

    events = read(tmp_path / "eval")
    assert curve(events) == [(70, 0.5)]
    assert curve(events, "precision @ 1") == [(70, 0.75)]
    assert scores.read(tmp_path / "eval") == {70: 0.75}
    [(step, notes)] = tensors(events, "evaluation")
    assert (step, notes.item()) == (70, b"Notes.")
    assert plugin(events, "confusion_matrix") == "images"
    [event] = tensors(events, "confusion_matrix")
    width, height, [picture] = decoded(event)
    assert (event[0], width, height) == (70, 320, 320)
    # One shade per entry, the darker the larger its share of the true class.
    shades = picture[::160, ::160, 0]
    np.testing.assert_allclose(shades, [[64, 191], [255, 255]], atol=1)
    assert np.all(picture[:160, 160:] == picture[0, 160])


def test_evaluations_of_two_checkpoints_are_two_points(tmp_path):
    summaries = EvaluationSummaries(tmp_path)
    for step, loss in ((50, 0.5), (100, 0.25)):
        summaries.write(step, {"total_loss": loss}, np.eye(2, dtype=np.int64), "")

    assert curve(read(tmp_path)) == [(50, 0.5), (100, 0.25)]


@pytest.mark.parametrize(
    ("below", "reason"), [(".", "File exists"), ("deeper", "Not a directory")]
)
def test_evaluation_folder_that_cannot_be_made_is_a_usage_error(
    tmp_path, below, reason
):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / below

    with pytest.raises(UsageError, match=unwritable(folder, reason, ELSEWHERE)):
        EvaluationSummaries(folder)
