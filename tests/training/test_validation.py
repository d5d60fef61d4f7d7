"""Validation while training: the scores of eval.py, the steps of a run without."""

import json
import math

import keras
import pytest
from tensorboard.backend.event_processing import tag_types
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

import runs
import scored_runs
import small_runs
from cifar10.config.config import Config, Config as PythonConfig
from cifar10.errors import UsageError
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.interface.train import read_record
from cifar10.run_directory import checkpoints, early_stopping, restoring, scores
from cifar10.run_directory.early_stopping import EarlyStopping
from cifar10.training import periodic, train as training
from scored_runs import IMAGES


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    scored_runs.use_few_images(monkeypatch.setattr)


def config(train_dir, data_dir, **options):
    """A model with batch norm and dropout on two towers."""
    return Config(
        **{
            "num_gpus": 2,
            "batch_size": 8,
            "max_steps": 12,
            "checkpoint_steps": 6,
            "log_frequency": 4,
            "summary_steps": 100,
            "model": "small_runs:small",
            "precision": "float32",
            "deterministic": True,
            "data": "synthetic",
            "data_dir": str(data_dir),
            "train_dir": str(train_dir),
            **options,
        }
    )


def train(*arguments, **options):
    # As a process of its own numbers its layers; checkpoints hold their names.
    keras.backend.clear_session(free_memory=False)
    return training.train(config(*arguments, **options))


def scored(train_dir, folder="eval"):
    """The lines of eval/metrics.jsonl."""
    return runs.logged(train_dir / folder)


def steps_scored(train_dir):
    return [line["step"] for line in scored(train_dir)]


def saved(train_dir):
    return checkpoints.steps(train_dir / "checkpoints")


def tags(folder):
    """The step of each event by tag, in the order in which TensorBoard has them."""
    events = EventAccumulator(str(folder), size_guidance={tag_types.TENSORS: 0})
    events.Reload()
    return {
        tag: [event.step for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


# ---- The scores


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory, stand_in_dir):
    """A run that was scored at steps 6 and 12; its directory."""
    run = tmp_path_factory.mktemp("scored") / "run"
    with pytest.MonkeyPatch.context() as patch:
        scored_runs.use_few_images(patch.setattr)
        train(run, stand_in_dir, eval_steps=6)
    return run


def test_scores_equal_the_scores_of_eval(tmp_path, scored_run):
    own, eval_dir = scored(scored_run), tmp_path / "other"
    assert [line["step"] for line in own] == [6, 12]
    assert own[0]["cross_entropy"] != own[1]["cross_entropy"]
    curves = tags(scored_run / "eval")
    flags = runs.flags(train_dir=scored_run, batch_size=8, eval_dir=eval_dir)
    done = runs.call("eval.py", "--run_once", *flags)
    assert done.returncode == 0, done.stderr
    (theirs,) = scored(tmp_path, "other")
    assert theirs == own[-1]
    assert theirs["num_examples"] == IMAGES
    assert curves == {tag: [6, *steps] for tag, steps in tags(eval_dir).items()}


def test_scoring_changes_no_step(tmp_path, stand_in_dir, scored_run):
    train(tmp_path / "without", stand_in_dir)
    for step in (6, 12):
        ours, theirs = (
            runs.files(runs.checkpoint(run, step))
            for run in (scored_run, tmp_path / "without")
        )
        facts = json.loads(ours.pop("manifest.json"))
        expected = json.loads(theirs.pop("manifest.json"))
        assert ours == theirs
        assert facts.pop("validation")["images"] == IMAGES
        others = {"sha256": "", "seconds": {}, "chain": {}}
        assert {**facts, **others} == {**expected, **others}


def test_nothing_is_written_through_a_link(tmp_path, stand_in_dir):
    run, options = tmp_path / "run", {"model": runs.SMALL, "num_gpus": 1}
    train(run, stand_in_dir, **options, max_steps=1)
    (run / "eval").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="link"):
        train(run, stand_in_dir, **options, max_steps=2, eval_steps=1)


# ---- What it decides


@pytest.fixture
def correct(monkeypatch):
    """How many images are recognized, by step."""
    by_step = {}
    scored_runs.decide(monkeypatch.setattr, by_step)
    return by_step


# The best is that of step 15, and 24 the third without a gain.
RISING_AND_FALLING = {3: 20, 6: 50, 9: 40, 12: 50, 15: 60, 18: 60, 21: 59, 24: 10}
STOPPED = {
    "max_steps": 100,
    "checkpoint_steps": 4,
    "keep_checkpoints": 3,
    "eval_steps": 3,
    "stop_after_no_gain": 3,
}
# Where the model is not the subject.
SIMPLE = {**STOPPED, "model": runs.SMALL, "num_gpus": 1, "summary_steps": 100}


@pytest.mark.slow
def test_kills_change_nothing(tmp_path, stand_in_dir, correct):
    """Neither where it ends, nor the checkpoints, nor the scores that are recorded."""
    correct.update(RISING_AND_FALLING)
    options = {**STOPPED, "keep_best": 2}
    assert train(tmp_path / "whole", stand_in_dir, **options) == 24

    run = tmp_path / "run"
    for moment, step in (
        ("recorded in part", 9),
        ("scored", 15),
        ("saved in part", 24),
        ("scored", 24),
    ):
        config_of_run = config(run, stand_in_dir, **options)
        scored_runs.killed(config_of_run, correct, moment, step)
        assert steps_scored(run)[-1] <= step
    assert train(run, stand_in_dir, **options) == 24
    assert saved(run) == saved(tmp_path / "whole")
    for step in saved(run):
        ours, theirs = (
            runs.files(runs.checkpoint(tmp_path / name, step))
            for name in ("run", "whole")
        )
        assert ours == theirs
    assert scored(run) == scored(tmp_path / "whole")
    assert tags(run / "eval") == tags(tmp_path / "whole" / "eval")


def test_an_early_end_counts_as_finished(tmp_path, stand_in_dir, correct, capsys):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**STOPPED, "schedule": "linear", "precision": "float32"}
    flags = runs.training_flags(run, stand_in_dir, **options)
    done = runs.call("train.py", *flags)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "precision @ 1 = 0.300 [0.241, 0.367] at step 15" in said
    assert "Ended at step 24 by --stop_after_no_gain 3." in said
    assert saved(run) == [15, 20, 21, 24], "the newest ones and the best"

    again = runs.call("train.py", *flags)
    assert (again.returncode, again.stderr) == (0, "")
    assert "\nNothing to do.\n" in again.stdout

    # It counts on from there.
    correct.update({27: 50, 30: 60})
    options |= {**SIMPLE, "stop_after_no_gain": 5, "deterministic": False}
    assert train(run, stand_in_dir, **options) == 30
    assert "0.300 [0.241, 0.367] at step 15" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_run_has_one_best_checkpoint_and_keeps_it(
    tmp_path, stand_in_dir, correct, capsys
):
    """Of equal scores the earlier one, also if it was scored between checkpoints."""
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**SIMPLE, "checkpoint_steps": 10, "keep_checkpoints": 1}
    train(run, stand_in_dir, **options)
    assert saved(run) == [15, 24]
    said = capsys.readouterr().out
    assert "With --val_fraction 0.1, a validation" in said
    best = " at step 15 on test, which also chose this step, so slightly optimistic\n"
    assert best in said, "in the line of the best"
    assert restoring.candidates(run / "checkpoints", "best") == [15]
    starts = (run / "starts.jsonl").read_bytes()
    train(run, stand_in_dir, **options)
    assert (run / "starts.jsonl").read_bytes() == starts, "it was begun once more"
    repeated = capsys.readouterr().out
    assert "Nothing to do." in repeated
    for text in (said, repeated):
        assert "Ended at step 24 by --stop_after_no_gain 3." in text
    assert read_record(run, 24, 1.0, PythonConfig()).best[0] == 15
    train(tmp_path / "without", stand_in_dir, **options, keep_best=0)
    assert saved(tmp_path / "without") == [24]
    said = " ".join(capsys.readouterr().out.split())
    assert "so slightly optimistic; its checkpoint was not kept" in said


def test_val_decides_and_the_last_score_is_on_test(
    tmp_path, stand_in_dir, correct, capsys
):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**SIMPLE, "val_fraction": 0.1}
    assert train(run, stand_in_dir, **options) == 24
    lines = {part: scored(run, part) for part in ("eval_val", "eval")}
    assert [line["step"] for line in lines["eval_val"]] == list(range(3, 25, 3))
    assert [line["step"] for line in lines["eval"]] == [15, 24]
    parts = {name: {line["part"] for line in of} for name, of in lines.items()}
    assert parts == {"eval_val": {"val"}, "eval": {"test"}}
    assert tags(run / "eval")["precision @ 1"] == [15, 24]
    # Scores on test decide nothing, however good.
    scores.append(run / "eval", 20, {"precision @ 1": 1.0}, IMAGES)
    assert 15 in saved(run)
    assert restoring.candidates(run / "checkpoints", "best") == [15]
    assert read_record(run, 24, 1.0, PythonConfig()).best[0] == 15
    said = capsys.readouterr().out
    assert "optimistic" not in said
    assert "] at step 15 on val" in " ".join(said.split())
    assert "export --output best_model --step best" in said


def test_a_training_ends_well_although_its_test_images_are_gone(
    tmp_path, stand_in_dir, monkeypatch, capsys
):
    """As after another command has prepared the folder's pictures again."""
    make = periodic.scored_set

    def scored_set(training, split):
        if split == "test":
            raise UsageError("The prepared pictures cannot be used.")
        return make(training, split)

    monkeypatch.setattr(periodic, "scored_set", scored_set)
    options = {"max_steps": 4, "eval_steps": 4, "val_fraction": 0.1}
    assert train(tmp_path / "run", stand_in_dir, **options) == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "no scores on test: The prepared pictures cannot be used." in said
    assert "Done. The run is in" in said


def test_the_last_lines_show_the_score_of_the_best_on_test(
    tmp_path, stand_in_dir, monkeypatch, capsys
):
    """It is what `eval` finds, and the training leaves its own weights as they are."""
    score, of_val = ScoredSet.score, iter((0.2, 0.9, 0.3))

    def scored_on(self, *values):
        result = score(self, *values)
        if self.split == "val":
            result.scalars["precision @ 1"] = next(of_val)
        return result

    monkeypatch.setattr(ScoredSet, "score", scored_on)
    run, options = tmp_path / "run", {"max_steps": 12, "eval_steps": 4}
    train(run, stand_in_dir, **options, val_fraction=0.1)
    best, last = scored(run)
    assert (best["step"], last["step"]) == (8, 12)
    said = " ".join(capsys.readouterr().out.split())
    shown = scores.shown("precision @ 1", best["precision @ 1"], IMAGES)
    assert f"at step 8 on val on test: {shown} export it:" in said
    assert best["cross_entropy"] != last["cross_entropy"]
    for step, expected in (("best", best), ("12", last)):
        flags = runs.flags(train_dir=run, batch_size=8, eval_dir=tmp_path / step)
        done = runs.call("eval.py", "--step", step, *flags)
        assert done.returncode == 0, done.stderr
        assert f"step {expected['step']} on test" in done.stdout
        assert scored(tmp_path, step) == [expected]


def test_val_images_seen_by_the_initial_weights_are_reported(
    tmp_path, stand_in_dir, capsys
):
    options = {"max_steps": 1, "fresh": True, "model": runs.SMALL, "num_gpus": 1}
    for of_origin, of_run, is_told in (
        (0.0, 0.2, True),
        (0.1, 0.2, True),
        (0.2, 0.2, False),
        (0.2, 0.1, False),
    ):
        origin, run = tmp_path / "origin", tmp_path / "run"
        train(origin, stand_in_dir, val_fraction=of_origin, **options)
        capsys.readouterr()
        given = {"val_fraction": of_run, "initial_weights": str(origin)}
        train(run, stand_in_dir, **options, **given)
        said = " ".join(capsys.readouterr().out.split())
        assert ("trained on images that are val here" in said) is is_told
        if of_origin == 0.1:  # Nor does a run between them hide it.
            given["initial_weights"] = str(run)
            train(tmp_path / "third", stand_in_dir, **options, **given)
            said = " ".join(capsys.readouterr().out.split())
            assert "trained on images that are val here" in said


def test_a_best_step_is_scored_once_if_it_is_the_newest(
    tmp_path, stand_in_dir, correct, capsys
):
    correct.update({3: 20, 6: 50})
    run = tmp_path / "run"
    train(run, stand_in_dir, **{**SIMPLE, "max_steps": 6, "val_fraction": 0.1})
    assert steps_scored(run) == [6]
    said = " ".join(capsys.readouterr().out.split())
    assert "at step 6 on val on test: precision @ 1 = 0.250" in said


def test_eval_scores_the_named_split(tmp_path, stand_in_dir):
    run = tmp_path / "run"
    options = {"max_steps": 4, "eval_steps": 4, "model": runs.SMALL, "num_gpus": 1}
    train(run, stand_in_dir, **options, val_fraction=0.2)
    for part, folder in (("val", "eval_val"), ("test", "eval")):
        flags = runs.flags(train_dir=run, batch_size=8, eval_data=part)
        done = runs.call(
            "eval.py", "--run_once", *flags, f"--eval_dir={tmp_path}/{part}"
        )
        assert done.returncode == 0, done.stderr
        assert f" {part} images" in done.stdout
        assert scored(tmp_path, part) == scored(run, folder)
    assert scored(run, "eval_val") != scored(run, "eval")
    # A run without val has none to score.
    train(tmp_path / "two", stand_in_dir, **options)
    flags = runs.flags(train_dir=tmp_path / "two", eval_data="val")
    done = runs.call("eval.py", "--run_once", *flags)
    assert done.returncode == 2
    assert "val" in done.stderr


def test_the_named_score_decides_the_best(tmp_path, stand_in_dir, capsys):
    run = tmp_path / "run"
    options = {"max_steps": 4, "checkpoint_steps": 2, "eval_steps": 2, "num_gpus": 1}
    options |= {"model": runs.SMALL, "keep_best": 1, "best_by": "macro F1"}
    train(run, stand_in_dir, **options)
    assert "macro F1 = " in capsys.readouterr().out
    # A run that goes on by another score counts anew, and --step best follows it.
    train(run, stand_in_dir, **{**options, "max_steps": 8, "best_by": "cross_entropy"})
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 4.0)):
        scores.append(
            run / "eval", step, {"precision @ 1": step / 10, "cross_entropy": loss}, 200
        )
    assert restoring.candidates(run / "checkpoints", "best") == [4]
    for by, best in (("cross_entropy", (4, 1.0)), ("precision @ 1", (8, 0.8))):
        assert read_record(run, 8, 1.0, PythonConfig(best_by=by)).best == best
    # The run has ended, so it is only told by the score that is named now.
    capsys.readouterr()
    named = {"max_steps": 8, "best_by": "precision @ 1"}
    train(run, stand_in_dir, **{**options, **named})
    assert "Best:   precision @ 1 = 0.800" in capsys.readouterr().out


@pytest.mark.slow
def test_scores_in_logs_do_not_affect_a_run(tmp_path, stand_in_dir, correct):
    """Neither the scores of eval.py there, nor that they are lost."""
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    train(run, stand_in_dir, **{**SIMPLE, "max_steps": 11})
    scores.append(run / "eval", 11, {"precision @ 1": 1.0}, IMAGES)
    train(run, stand_in_dir, **{**SIMPLE, "max_steps": 20})
    (run / "eval" / "metrics.jsonl").unlink()
    assert train(run, stand_in_dir, **SIMPLE) == 24


# ---- The count


def test_a_gain_is_a_better_score():
    for found, expected in (
        ([0.0, 0.0], EarlyStopping(10, 1, 1, 0.0)),
        ([0.5, 0.6, 0.6, 0.5], EarlyStopping(10, 2, 2, 0.6)),
        ([0.5, 0.6, 0.4, 0.4], EarlyStopping(10, 3, 1, 0.4, "cross_entropy")),
        ([math.nan, 0.6, math.nan], EarlyStopping(10, 2, 1, 0.6, "cross_entropy")),
    ):
        counted = EarlyStopping(best_by=expected.best_by)
        assert not counted.should_stop(1), "nothing has been scored"
        for step, score in enumerate(found, 1):
            counted = counted.updated(step, score, 10)
        assert counted == expected
        kept = counted.to_manifest()
        assert EarlyStopping.from_manifest(kept, expected.best_by) == expected
        # What was best by another score is no best by this one.
        assert not EarlyStopping.from_manifest(kept, "macro F1").scores
        assert not counted.should_stop(None)
        assert not counted.should_stop(expected.without_gain + 1)
        assert counted.should_stop(expected.without_gain)


def test_the_best_is_exported_if_its_checkpoint_is_kept(tmp_path):
    settings = Config(train_dir=str(tmp_path), max_steps=300)
    for folder in ("checkpoints/step-00000300", "eval"):
        (tmp_path / folder).mkdir(parents=True)
    scores.append(tmp_path / "eval", 100, {"precision @ 1": 0.973}, 10)
    said = early_stopping.outcome(settings, 300, EarlyStopping())
    assert "step 100" in said
    assert "export" not in said
    assert "chose this step" not in said, "there was no choice"
    scores.append(tmp_path / "eval", 300, {"precision @ 1": 0.98}, 10)
    said = early_stopping.outcome(settings, 300, EarlyStopping())
    assert "--step best" in said
    assert "on test, which also chose this step" in said


@pytest.mark.parametrize("unreadable", ["eval", "eval_val"])
def test_the_best_is_named_although_a_log_cannot_be_read(tmp_path, unreadable):
    parts = {"data_parts": ["train", "val", "test"], "data_division": ""}
    small_runs.describe(tmp_path, parameters=1, **parts)
    for part in ("eval", "eval_val"):
        (tmp_path / part).mkdir()
        if part != unreadable:
            scores.append(tmp_path / part, 100, {"precision @ 1": 0.9}, 10)
    (tmp_path / unreadable / "metrics.jsonl").mkdir()
    settings = Config(train_dir=str(tmp_path), max_steps=300)
    record = EarlyStopping().updated(100, 0.9, 10)
    assert "at step 100 on val" in early_stopping.outcome(settings, 300, record)
    (tmp_path / "checkpoints/step-00000100").mkdir(parents=True)
    assert "export it" in early_stopping.outcome(settings, 300, record)


def test_the_last_lines_say_why_a_run_ended_and_that_its_best_is_gone(tmp_path):
    options = {"max_steps": 300, "eval_steps": 100, "stop_after_no_gain": 1}
    (tmp_path / "checkpoints/step-00000200").mkdir(parents=True)
    (tmp_path / "eval").mkdir()
    record = EarlyStopping()
    for step, score in ((100, 0.9), (200, 0.8)):
        scores.append(tmp_path / "eval", step, {"precision @ 1": score}, 10)
        record = record.updated(step, score, 10)
    settings = Config(train_dir=str(tmp_path), **options)
    ended, best = early_stopping.outcome(settings, 200, record).splitlines()
    assert ended == "Ended at step 200 by --stop_after_no_gain 1."
    assert "at step 100 on test" in best
    assert best.endswith("its checkpoint was not kept (--keep_best)")


# ---- Flags


def test_meaningless_flags_are_refused():
    for options, flag in (
        ({"eval_steps": 11, "max_steps": 10}, "--eval_steps 11"),
        ({"verify_steps": 11, "max_steps": 10}, "--verify_steps 11"),
        ({"stop_after_no_gain": 5}, "--stop_after_no_gain 5 .* --eval_steps"),
        ({"best_by": "accuracy"}, "--best_by accuracy: .*precision @ 1, .*macro F1"),
    ):
        with pytest.raises(UsageError, match=flag):
            Config(**options)
