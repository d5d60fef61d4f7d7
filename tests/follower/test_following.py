"""Following a training: which checkpoints are scored, and when it ends."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

import runs
from cifar10.config import config, regular_files
from cifar10.errors import StoppedError, UsageError
from cifar10.evaluation import evaluate
from cifar10.follower import followed_run
from cifar10.run_directory import checkpoints, retention, scores
from cifar10.scoring import metrics, scored_set


@pytest.fixture
def run_dir(tmp_path):
    """A run that is to end at step 30 and has no checkpoint yet."""
    added = {"parameters": 1, "simulated": False, "global_batch_size": 128}
    settings = {**vars(config.Config()), **added, "max_steps": 30, "data_dir": "."}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def save(run_dir, step, **facts):
    variables = {"value": tf.Variable(float(step)), "global_step": tf.Variable(step)}
    facts = {"seed": 0, "global_batch_size": 128, **facts}
    return checkpoints.save(run_dir / "checkpoints", variables, step=step, facts=facts)


@pytest.fixture
def follow(run_dir, monkeypatch):
    """Follows the run with a simple model and scorer; returns the steps it scored.

    `while_waiting`, `while_loading` and `while_scoring` are called instead of sleeping,
    before loading and instead of scoring, one entry a time, and play the training; what
    the last of them return is the score.
    """

    class TrainedModel:
        def __init__(self, directory, *_, **__):
            self.settings = json.loads((directory / "config.json").read_text())
            self.model, self.trainable = None, [tf.Variable(0.0)]

        def load(self, checkpoint):
            next(follow.loads, lambda: None)()
            step = tf.Variable(0)
            found = {"value": self.trainable[0], "global_step": step}
            checkpoints.restore(checkpoint, found)

    class Scorer:
        def __init__(self, *_, **__):
            pass

        def score(self, values, batches, _):
            sums = next(follow.scores, lambda: None)()
            follow.scored.append(int(values[0]))
            follow.batch = next(iter(batches))
            of_each = np.eye(10, dtype=int)
            return sums or metrics.Sums(1.0, 10 * of_each[0], of_each), 0.0

    class Dataset:
        classes, name, is_real, description = 10, "none", False, "no data"
        class_names = tuple("abcdefghij")

        def read(self, split):
            label = {"test": 3, "train": 7}[split]
            return np.zeros((1, 32, 32, 3), np.uint8), np.array([label], np.int32)

    def follow(*, while_waiting=(), while_loading=(), while_scoring=(), **options):
        waits = iter(while_waiting)
        follow.loads, follow.scores = iter(while_loading), iter(while_scoring)
        follow.scored = []
        monkeypatch.setattr(followed_run, "TrainedModel", TrainedModel)
        monkeypatch.setattr(scored_set.scorer, "Scorer", Scorer)
        monkeypatch.setattr(evaluate.datasets, "find_again", lambda *_: Dataset())
        monkeypatch.setattr(evaluate.devices, "place_evaluation", str)
        monkeypatch.setattr(time, "sleep", lambda seconds: next(waits)())
        arguments = {"train_dir": str(run_dir), **options}
        evaluate.run(evaluate.Options(**arguments))
        return follow.scored

    return follow


def test_each_newest_checkpoint_is_scored_once_until_the_training_ends(run_dir, follow):
    scored = follow(
        while_waiting=[
            lambda: save(run_dir, 10),
            lambda: None,
            lambda: None,
            lambda: (save(run_dir, 15), save(run_dir, 20)),
            lambda: save(run_dir, 30),
        ]
    )
    assert scored == [10, 20, 30]


@pytest.mark.parametrize(
    ("eval_data", "label", "said"),
    [("test", 3, "test images"), ("train_eval", 7, "training images")],
)
def test_the_images_that_the_flag_names_are_scored(
    run_dir, follow, capsys, eval_data, label, said
):
    save(run_dir, 30)
    follow(run_once=True, eval_data=eval_data)
    _, labels, _ = follow.batch
    assert labels.numpy().tolist() == [label]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "side"), [("tutorial", 24), ("flip_translate", 32)])
def test_images_are_prepared_as_the_run_did(run_dir, follow, kind, side):
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**settings, "distortions": kind}))
    save(run_dir, 30)
    follow(run_once=True)
    images, _, _ = follow.batch
    assert images.shape == (1, side, side, 3)


def test_a_checkpoint_that_vanishes_is_passed_over_for_its_successor(run_dir, follow):
    save(run_dir, 10)

    def replace():
        save(run_dir, 30)
        shutil.rmtree(run_dir / "checkpoints" / "step-00000010")

    assert follow(while_loading=[replace], run_once=True) == [30]


@pytest.mark.parametrize("other", [{"seed": 1}, {"global_batch_size": 8}], ids=str)
def test_a_checkpoint_of_another_run_is_refused(run_dir, follow, capsys, other):
    save(run_dir, 10)
    save(run_dir, 20, **other)
    assert follow(while_waiting=[lambda: save(run_dir, 30)]) == [10, 30]
    said = capsys.readouterr().err
    assert said.count("step 20 is refused") == 1
    assert f"its {next(iter(other))} is {next(iter(other.values()))}" in said


def test_a_checkpoint_is_not_deleted_while_it_is_scored(run_dir, follow):
    save(run_dir, 10)

    def train_on():
        save(run_dir, 30)
        only_the_newest = retention.Rules(1, 0, None, run_dir / "eval")
        retention.apply(run_dir / "checkpoints", only_the_newest, step=30)
        assert checkpoints.steps(run_dir / "checkpoints") == [10, 30]

    scored = follow(while_scoring=[train_on], while_waiting=[lambda: None])
    assert scored == [10, 30]


def test_a_longer_training_is_followed_further(run_dir, follow):
    settings = json.loads((run_dir / "config.json").read_text())

    def extend():
        settings["max_steps"] = 40
        (run_dir / "config.json").write_text(json.dumps(settings))

    save(run_dir, 30)
    scored = follow(while_scoring=[extend], while_waiting=[lambda: save(run_dir, 40)])
    assert scored == [30, 40]


def settle(run_dir, **settings):
    """Changes the run's `config.json`."""
    path = run_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_what_the_training_scores_is_not_scored_again(run_dir, follow, capsys):
    """But for the last checkpoint, whose tables only an evaluation prints."""
    settle(run_dir, eval_steps=10)
    (run_dir / "eval").mkdir()
    for step in (10, 30):
        scores.append(run_dir / "eval", step, {"precision @ 1": 0.9}, num_examples=1)
    later = [lambda step=step: save(run_dir, step) for step in (10, 15, 20, 30)]
    assert follow(while_waiting=later) == [15, 20, 30]
    assert "step 10: scored by the training itself\n" in capsys.readouterr().out
    settle(run_dir, max_steps=40)
    assert follow(run_once=True) == [30]
    elsewhere = {"eval_dir": str(run_dir / "other")}
    later = [lambda: save(run_dir, 40)]
    assert follow(while_waiting=later, **elsewhere) == [30, 40]


def test_a_training_that_ends_for_want_of_a_gain_has_finished(run_dir, follow, capsys):
    settle(run_dir, eval_steps=10, stop_after_no_gain=2)
    counts = [{"correct": 1, "images": 2, "step": 5, "without_gain": n} for n in (1, 2)]
    scored = follow(
        while_waiting=[
            lambda: save(run_dir, 10, validation=counts[0]),
            lambda: save(run_dir, 20, validation=counts[1]),
        ]
    )
    assert scored == [10, 20]
    assert "finished at step 20" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named_once_and_passed_over(run_dir, follow, capsys):
    save(run_dir, 10)
    (save(run_dir, 20) / "state.index").write_bytes(b"")
    scored = follow(
        while_waiting=[lambda: None, lambda: None, lambda: save(run_dir, 30)]
    )
    assert scored == [10, 30]
    assert capsys.readouterr().err.count("step 20 is refused") == 1


def test_it_says_once_what_it_waits_for(run_dir, follow, capsys):
    follow(while_waiting=[lambda: None, lambda: None, lambda: save(run_dir, 30)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert "no checkpoint" in said[0]
    assert said[1].endswith("first at step 1,000 or its end (--checkpoint_steps).")
    assert said[2] == "Looking every 30 s."
    assert "finished at step 30" in said[3]


def correct(count):
    """Returns sums over ten images, of which some are recognized."""
    confusion = np.zeros((10, 10), int)
    confusion[0, 0], confusion[0, 1] = count, 10 - count
    return metrics.Sums(1.0, confusion[0], confusion)


def test_a_checkpoint_is_a_line_and_the_last_one_has_tables(run_dir, follow, capsys):
    (run_dir / "eval").mkdir()
    # Scores of other numbers of images do not compare.
    scores.append(run_dir / "eval", 5, {"precision @ 1": 0.9}, num_examples=1000)
    save(run_dir, 10)
    follow(
        while_waiting=[lambda: save(run_dir, 20), lambda: save(run_dir, 30)],
        while_scoring=[lambda: correct(3), lambda: correct(5), lambda: correct(4)],
    )
    written, said = capsys.readouterr()
    # Waiting is no news between two checkpoints.
    assert said.count("Waiting for the next checkpoint.") == 1
    first, *lines, empty, title = written.splitlines()[:6]
    assert first == "Scoring 1 test images of no data; averaged variables."
    assert [line.partition(" ")[2] for line in lines] == [
        "step 10: precision @ 1 = 0.300 (chance: 0.100)",
        "step 20: precision @ 1 = 0.500 (+0.200, the best so far)",
        "step 30: precision @ 1 = 0.400 (-0.100; best 0.500 at step 20)",
    ]
    assert not empty
    assert title.endswith("step 30: precision @ 1 = 0.400 (chance: 0.100)")
    assert written.count("confusion matrix") == 1

    # Scored again, it is compared with the others and not with itself.
    follow(while_scoring=[lambda: correct(4)])
    assert "(-0.100; best 0.500 at step 20)" in capsys.readouterr().out


def score(run_dir, **precisions):
    """Notes scores by step, as in `at_10=0.5`."""
    (run_dir / "eval").mkdir(exist_ok=True)
    for name, precision in precisions.items():
        step = int(name.removeprefix("at_"))
        scores.append(run_dir / "eval", step, {"precision @ 1": precision}, 10)


@pytest.mark.parametrize(("step", "expected"), [("20", 20), ("best", 10)])
def test_one_step_is_scored_once_and_that_is_all(
    run_dir, follow, capsys, step, expected
):
    for saved in (10, 20, 25):  # The training goes on.
        save(run_dir, saved)
    score(run_dir, at_10=0.5, at_20=0.5, at_25=0.4)
    assert follow(step=step) == [expected]
    written, said = capsys.readouterr()
    assert f"step {expected}: precision @ 1 = " in written
    assert written.count("confusion matrix") == 1
    assert said == ""


def test_the_best_that_is_left_is_used_and_the_better_one_named(
    run_dir, follow, capsys
):
    save(run_dir, 20)
    score(run_dir, at_10=0.9, at_20=0.5)
    assert follow(step="best") == [20]
    said = capsys.readouterr().err
    assert "step 10 scored 0.900" in said
    assert "step 20, which scored 0.500" in said


@pytest.mark.parametrize(
    ("step", "said"),
    [("15", "There are: 10, 20."), ("best", "eval.py --step 20 --train_dir")],
)
def test_a_step_that_cannot_be_scored_is_refused_with_what_there_is(
    run_dir, follow, step, said
):
    save(run_dir, 10)
    save(run_dir, 20)
    with pytest.raises(UsageError, match=f"(?s)--step {step}: .*{said}"):
        follow(step=step)


def test_a_damaged_step_is_refused_although_others_are_intact(run_dir, follow):
    save(run_dir, 10)
    (save(run_dir, 20) / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=r"--step 20: .*manifest\.json.* 10, 20\."):
        follow(step="20")


def test_a_score_of_an_earlier_step_leaves_the_curve_as_it_is(run_dir, follow):
    """TensorBoard drops the later part of a curve that goes back."""
    for step in (10, 20, 30):
        save(run_dir, step)
        follow(run_once=True)
    follow(step="10")
    events = EventAccumulator(str(run_dir / "eval"), size_guidance={"tensors": 0})
    events.Reload()
    curve = [event.step for event in events.Tensors("precision @ 1")]
    assert curve == [10, 20, 30]
    lines = runs.logged(run_dir / "eval")
    assert [line["step"] for line in lines] == [10, 20, 30, 10]


@pytest.mark.parametrize("end", [KeyboardInterrupt, StoppedError("", 143)], ids=repr)
def test_an_interrupted_evaluation_prints_the_last_tables(run_dir, follow, capsys, end):
    def interrupt():
        raise end

    save(run_dir, 10)
    with pytest.raises((KeyboardInterrupt, StoppedError)):
        follow(
            while_waiting=[lambda: save(run_dir, 20)],
            while_scoring=[lambda: correct(3), interrupt],
        )
    written = capsys.readouterr().out
    assert written.count("confusion matrix") == 1
    assert "step 20" not in written

    with pytest.raises((KeyboardInterrupt, StoppedError)):
        follow(while_scoring=[interrupt])
    assert "confusion matrix" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("decay", "use_averages", "scored"),
    [
        (0.9999, True, "averaged variables"),
        (0.9999, False, "the variables themselves"),
        (0.0, True, "the variables themselves"),
    ],
)
def test_averages_are_said_to_be_scored_where_there_are_any(
    run_dir, follow, capsys, decay, use_averages, scored
):
    settings = json.loads((run_dir / "config.json").read_text())
    settings["moving_average_decay"] = decay
    (run_dir / "config.json").write_text(json.dumps(settings))
    save(run_dir, 30)
    follow(run_once=True, use_averages=use_averages)
    assert f"10 of 1 test images of no data; {scored}." in capsys.readouterr().out


def test_precisions_at_numbers_of_ones_own(run_dir, follow, capsys):
    save(run_dir, 30)
    follow(run_once=True, top_k="3,10")
    assert "precision @ 3 = 1.000, precision @ 5 = 1.000" in capsys.readouterr().out
    (line,) = scores.read_lines(run_dir / "eval" / "metrics.jsonl")
    assert line["precision @ 10"] == 1.0
    with pytest.raises(UsageError, match=r"--top_k 11: there are 10 classes\."):
        follow(run_once=True, top_k="11")


def test_nothing_is_written_to_a_folder_that_is_a_link(follow, run_dir, tmp_path):
    save(run_dir, 10)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run_dir / "eval").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="eval is a link, and nothing is written out"):
        follow(run_once=True)
    assert not any(elsewhere.iterdir())
    assert follow(run_once=True, eval_dir=str(run_dir / "eval")) == [10]


@pytest.mark.parametrize("run_once", [False, True])
def test_a_directory_that_may_not_be_read_is_refused(
    follow, run_dir, monkeypatch, run_once
):
    save(run_dir, 10)
    config_json = run_dir / "config.json"
    config_json.unlink()
    config_json.mkdir()  # Even root cannot read a folder.
    with pytest.raises(UsageError) as caught:
        follow(run_once=run_once)
    assert f"{run_dir}/config.json cannot be read: Is a directory" in str(caught.value)
    assert "Make it readable" in str(caught.value)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(regular_files, "opened", refuse)
    for looking in ("exists", "is_dir"):
        monkeypatch.setattr(Path, looking, refuse)
    with pytest.raises(UsageError, match=r"config\.json cannot be read: Permission"):
        follow(run_once=run_once)


@pytest.mark.parametrize("run_once", [False, True])
def test_a_file_as_directory_is_refused(follow, run_dir, run_once):
    with pytest.raises(
        UsageError, match="no directory of a run; it, or a part of its path, is a file"
    ):
        follow(train_dir=str(run_dir / "config.json"), run_once=run_once)


def test_checkpoints_that_may_not_be_looked_into_are_refused(follow, run_dir):
    folder = run_dir / "checkpoints"
    folder.symlink_to(folder)  # A link to itself cannot be followed, by root either.
    with pytest.raises(UsageError, match="checkpoints cannot be read: Too many levels"):
        follow(run_once=True)


def test_once_without_a_checkpoint_is_refused(follow, run_dir):
    with pytest.raises(UsageError, match=f"no checkpoint in {run_dir}"):
        follow(run_once=True)
