"""Validation while training: the scores of eval.py, the steps of a training without."""

import json
import re

import keras
import pytest
from tensorboard.backend.event_processing import tag_types
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

import runs
import scored_runs
from cifar10.config import cli
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.interface import record
from cifar10.interface.config import Config as PythonConfig
from cifar10.run_directory import checkpoints, gains, restoring, scores
from cifar10.run_directory.gains import Gains
from cifar10.tools.report import run as run_files
from cifar10.training import train as training
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


def check_eval(run, eval_dir):
    """Compares the last scores with those of eval.py."""
    own = scored(run)
    assert [line["step"] for line in own] == [6, 12]
    assert own[0]["cross_entropy"] != own[1]["cross_entropy"]
    curves = tags(run / "eval")
    flags = runs.flags(train_dir=run, batch_size=8, eval_dir=eval_dir)
    done = runs.call("eval.py", "--run_once", *flags)
    assert done.returncode == 0, done.stderr
    (theirs,) = scored(eval_dir.parent, eval_dir.name)
    assert theirs == own[-1]
    assert theirs["num_examples"] == IMAGES
    assert curves == {tag: [6, *steps] for tag, steps in tags(eval_dir).items()}
    assert "confusion_matrix" in curves


def test_scores_are_those_of_eval(tmp_path, scored_run):
    check_eval(scored_run, tmp_path / "other")


def compare(scored_run, other):
    """Fails unless steps and checkpoints are those of a training without scores."""
    for step in (6, 12):
        ours, theirs = (
            runs.files(runs.checkpoint(run, step)) for run in (scored_run, other)
        )
        facts = json.loads(ours.pop("manifest.json"))
        expected = json.loads(theirs.pop("manifest.json"))
        assert ours == theirs
        assert facts.pop("validation")["images"] == IMAGES
        assert {**facts, "sha256": ""} == {**expected, "sha256": ""}
    losses, expected = (
        [(line["step"], line["total_loss"]) for line in runs.logged(run)]
        for run in (scored_run, other)
    )
    assert losses == expected


def test_the_steps_are_those_of_a_training_without_scores(
    tmp_path, stand_in_dir, scored_run
):
    train(tmp_path / "without", stand_in_dir)
    compare(scored_run, tmp_path / "without")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"variable_update": "mirrored", "steps_per_call": 2},
        {"sections": "batch_normalization,dropout", "moving_average_decay": 0.0},
    ],
    ids=" ".join,
)
def test_steps_and_scores_of_other_kinds_are_the_same_too(
    tmp_path, stand_in_dir, options
):
    train(tmp_path / "without", stand_in_dir, **options)
    train(tmp_path / "with", stand_in_dir, eval_steps=6, **options)
    compare(tmp_path / "with", tmp_path / "without")
    check_eval(tmp_path / "with", tmp_path / "other")


@pytest.mark.slow
def test_without_a_place_to_write_the_training_goes_on(tmp_path, stand_in_dir, capsys):
    run = tmp_path / "run"
    train(run, stand_in_dir, max_steps=6)
    (run / "eval").write_text("in the way")
    assert train(run, stand_in_dir, eval_steps=6, stop_after_no_gain=9) == 12
    assert "not recorded" in capsys.readouterr().err
    manifest = checkpoints.verify(run / "checkpoints", 12).manifest
    assert manifest["validation"]["step"] == 12


def test_nothing_is_written_through_a_link(tmp_path, stand_in_dir):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="link"):
        train(tmp_path / "run", stand_in_dir, eval_steps=6)


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
@pytest.mark.parametrize(
    ("options", "kills"),
    [
        (
            {"keep_best": 2},
            [("scored", 15), ("saved", 18), ("saved in part", 24), ("scored", 24)],
        ),
        (
            {"variable_update": "mirrored", "steps_per_call": 2},
            [("recorded in part", 9), ("saved", 20)],
        ),
    ],
    ids=["keep_best", "mirrored"],
)
def test_kills_change_nothing(tmp_path, stand_in_dir, correct, options, kills):
    """Neither where it ends, nor the checkpoints, nor the scores that are recorded."""
    correct.update(RISING_AND_FALLING)
    options = {**STOPPED, **options}
    assert train(tmp_path / "whole", stand_in_dir, **options) == 24

    run = tmp_path / "run"
    for moment, step in kills:
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


def test_an_early_end_is_that_of_a_finished_run(
    tmp_path, stand_in_dir, correct, capsys, monkeypatch
):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**STOPPED, "schedule": "linear", "precision": "float32"}
    flags = runs.training_flags(run, stand_in_dir, **options)
    done = runs.call("train.py", *flags)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "precision @ 1 = 0.300 at step 15" in said
    assert f"--resume {run} --stop_after_no_gain 6" in said
    assert saved(run) == [16, 20, 24]

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(cli, "import_tensorflow", pytest.fail)
        again = runs.call("train.py", *flags)
    assert (again.returncode, again.stderr) == (0, "")
    first, *_ = again.stdout.splitlines()
    assert first == "Nothing to do."
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert {**after, run: 0} == {**before, run: 0}  # It was locked for a moment.

    # It counts on from there.
    correct.update({27: 50, 30: 60})
    options |= {**SIMPLE, "stop_after_no_gain": 5, "deterministic": False}
    assert train(run, stand_in_dir, **options) == 30
    assert "0.300 at step 15" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_smaller_number_may_have_been_reached_already(
    tmp_path, stand_in_dir, correct, capsys
):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**SIMPLE, "max_steps": 22, "checkpoint_steps": 100}
    assert train(run, stand_in_dir, **options) == 22
    options |= {"max_steps": 100, "stop_after_no_gain": 2}
    assert train(run, stand_in_dir, **options) == 22
    assert "Nothing to do." in capsys.readouterr().out
    # Who follows the run has to know.
    settings = json.loads((run / "config.json").read_text())
    assert settings["stop_after_no_gain"] == 2


def test_a_run_has_one_best_and_keeps_it(tmp_path, stand_in_dir, correct, capsys):
    """Of equal scores the earlier one, also if it was scored between checkpoints."""
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**SIMPLE, "checkpoint_steps": 10, "keep_checkpoints": 1}
    train(run, stand_in_dir, **options, keep_best=1)
    assert saved(run) == [15, 24]
    said = capsys.readouterr().out
    assert re.findall(r"step (\d+): .*the best so far", said) == ["6", "15"]
    assert f"cifar10.evaluate('{run}', step=15)" in said
    assert restoring.candidates(run / "checkpoints", "best") == [15]
    assert record.read(run, 24, 1.0, PythonConfig()).best[0] == 15
    (read,) = run_files.read_all([run])
    assert read.best["step"] == 15


@pytest.mark.slow
def test_the_end_names_the_best_also_of_eval(
    tmp_path, stand_in_dir, correct, capsys, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["train.py"])
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**SIMPLE, "max_steps": 12, "keep_checkpoints": 1, "keep_best": 1}
    train(run, stand_in_dir, **options)
    assert "--step 6 --train_dir" in capsys.readouterr().out
    scores.append(run / "eval", 12, {"precision @ 1": 1.0}, IMAGES)
    train(run, stand_in_dir, **options)
    assert "--step 12 --train_dir" in capsys.readouterr().out


@pytest.mark.slow
def test_logs_decide_nothing(tmp_path, stand_in_dir, correct):
    """Neither the scores of eval.py there, nor that they are lost."""
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    train(run, stand_in_dir, **{**SIMPLE, "max_steps": 11})
    scores.append(run / "eval", 11, {"precision @ 1": 1.0}, IMAGES)
    train(run, stand_in_dir, **{**SIMPLE, "max_steps": 20})
    (run / "eval" / "metrics.jsonl").unlink()
    assert train(run, stand_in_dir, **SIMPLE) == 24


# ---- The count


def test_a_gain_is_a_higher_score():
    for found, expected in (
        ([], Gains()),
        ([0], Gains(0, 10, 1, 0)),
        ([0, 0], Gains(0, 10, 1, 1)),
        ([5, 6, 6, 5], Gains(6, 10, 2, 2)),
        ([5, 4, 3, 6], Gains(6, 10, 4, 0)),
    ):
        counted = Gains()
        for step, correct in enumerate(found, 1):
            counted = counted.after(step, correct, 10)
        assert counted == expected
        assert gains.of(counted.facts()) == expected
        assert not counted.have_ended(None)
        assert not counted.have_ended(expected.without_gain + 1)
        assert counted.have_ended(expected.without_gain)


def test_a_manifest_of_another_kind_is_damage(tmp_path):
    good = {"correct": 1, "images": 2, "step": 3, "without_gain": 0}
    checkpoints.save(tmp_path, {}, step=1, facts={"validation": good})
    assert gains.of(checkpoints.verify(tmp_path, 1).manifest).correct == 1
    odd = [good | {name: of} for name in good for of in (None, -1, 1.5, "1", 10**15)]
    odd += [None, [1, 2, 3, 4], {**good, "more": 1}, good | {"correct": 3}]
    odd += [good | {"images": 0, "correct": 0, "without_gain": 1}]
    for step, entry in enumerate(odd, 2):
        checkpoints.save(tmp_path, {}, step=step, facts={"validation": entry})
        with pytest.raises(checkpoints.DamagedError):
            checkpoints.verify(tmp_path, step)


# ---- Flags


def test_flags_that_make_no_sense_are_refused():
    for options, flag in (
        ({"eval_steps": 0}, "--eval_steps 0"),
        ({"eval_steps": 11, "max_steps": 10}, "--eval_steps 11"),
        ({"eval_steps": 3, "steps_per_call": 4}, "--steps_per_call 4"),
        ({"stop_after_no_gain": 5}, "--stop_after_no_gain 5"),
        ({"stop_after_no_gain": 0, "eval_steps": 5}, "--stop_after_no_gain 0"),
    ):
        with pytest.raises(UsageError, match=flag):
            Config(**options)
    Config(eval_steps=10, max_steps=10, steps_per_call=10, stop_after_no_gain=1)
