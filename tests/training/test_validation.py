"""Validation while training: the scores of eval.py, the steps of a training without."""

import json
import re
import time

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
from cifar10.scoring import scored_set
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
            "summary_steps": 6,
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


@pytest.mark.parametrize("decay", [0.9, pytest.param(0.0, marks=pytest.mark.slow)])
def test_what_is_written_is_what_eval_writes(tmp_path, stand_in_dir, capsys, decay):
    run = tmp_path / "run"
    train(run, stand_in_dir, eval_steps=6, moving_average_decay=decay)
    said = capsys.readouterr().out
    own = scored(run)
    assert [line["step"] for line in own] == [6, 12]
    curves = tags(run / "eval")
    assert own[0]["cross_entropy"] != own[1]["cross_entropy"]

    flags = runs.flags(train_dir=run, batch_size=8, eval_dir=tmp_path / "other")
    done = runs.call("eval.py", "--run_once", *flags)
    assert done.returncode == 0, done.stderr
    (theirs,) = scored(tmp_path, "other")
    assert theirs == own[-1]
    assert theirs["num_examples"] == IMAGES
    of_eval = tags(tmp_path / "other")
    assert curves == {tag: [6, *steps] for tag, steps in of_eval.items()}
    assert "confusion_matrix" in curves
    precision = f"precision @ 1 = {theirs['precision @ 1']:.3f}"
    assert precision in done.stdout
    (line,) = [line for line in said.splitlines() if " step 12: " in line]
    assert precision in line
    what = "averaged variables" if decay else "the variables themselves"
    assert f"Scores: every 6 steps, {IMAGES} test images of" in said
    assert what in said.replace("\n        ", " ")


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"steps_per_call": 2},
                {"variable_update": "mirrored"},
                {"sections": "batch_normalization,dropout"},
                {"num_gpus": 1, "batch_size": 16},
            )
        ),
    ],
    ids=" ".join,
)
def test_the_steps_are_those_of_a_training_without(tmp_path, stand_in_dir, options):
    train(tmp_path / "without", stand_in_dir, **options)
    train(tmp_path / "with", stand_in_dir, eval_steps=4, **options)
    assert steps_scored(tmp_path / "with") == [4, 8, 12]
    for step in (6, 12):
        ours, theirs = (
            runs.files(runs.checkpoint(tmp_path / name, step))
            for name in ("with", "without")
        )
        facts = json.loads(ours.pop("manifest.json"))
        expected = json.loads(theirs.pop("manifest.json"))
        assert ours == theirs
        assert facts.pop("validation")["images"] == IMAGES
        assert {**facts, "sha256": ""} == {**expected, "sha256": ""}
    losses = [
        [(line["step"], line["total_loss"]) for line in runs.logged(tmp_path / name)]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_its_time_is_none_of_the_steps(tmp_path, stand_in_dir, monkeypatch):
    score = scored_set.ScoredSet.score

    def slowly(*arguments):
        time.sleep(2.0)
        return score(*arguments)

    monkeypatch.setattr(scored_set.ScoredSet, "score", slowly)
    train(tmp_path / "run", stand_in_dir, eval_steps=4, log_frequency=1)
    lines = runs.logged(tmp_path / "run")
    seconds = lines[-1]["seconds"]
    assert seconds["evaluation"] >= 4.0
    after = next(line for line in lines if line["step"] == 5)
    assert after["examples_per_sec"] > 16 / 2.0
    assert after["seconds"]["following"] < 2.0


@pytest.mark.slow
def test_without_a_place_to_write_the_training_goes_on(tmp_path, stand_in_dir, capsys):
    run = tmp_path / "run"
    train(run, stand_in_dir, max_steps=6)
    (run / "eval").write_text("in the way")
    assert train(run, stand_in_dir, eval_steps=6, stop_after_no_gain=9) == 12
    said = capsys.readouterr().err
    assert "The training continues; its scores are not recorded there." in said
    manifest = checkpoints.verify(run / "checkpoints", 12).manifest
    assert manifest["validation"]["step"] == 12


def test_nothing_is_written_through_a_link(tmp_path, stand_in_dir):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is a link"):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ({}, [("recorded in part", 9), ("saved", 12), ("saved in part", 24)]),
        ({"keep_best": 2}, [("scored", 15), ("saved", 18), ("scored", 24)]),
        (
            {"variable_update": "mirrored", "steps_per_call": 2},
            [("saved", 20), ("scored", 24)],
        ),
    ],
    ids=["plain", "keep_best", "mirrored"],
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


def test_it_ends_as_a_finished_run_and_stays_so(
    tmp_path, stand_in_dir, correct, capsys, monkeypatch
):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    flags = runs.training_flags(run, stand_in_dir, **STOPPED, schedule="linear")
    model = ("--model", "small_runs:small", "--precision", "float32")
    done = runs.call("train.py", *flags, *model)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "step 24 by --stop_after_no_gain 3: the last 3 evaluations were" in said
    assert "not above the best, precision @ 1 = 0.300 at step 15." in said
    assert "Its checkpoint was not kept; --keep_best 1 would have kept it." in said
    assert (
        "had not fallen to its end, which --schedule linear does at step 100." in said
    )
    assert f"train.py --resume {run} --stop_after_no_gain 6" in said
    assert "Done." in said
    assert saved(run) == [16, 20, 24]

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(cli, "import_tensorflow", pytest.fail)
        again = runs.call("train.py", *flags, *model)
    assert (again.returncode, again.stderr) == (0, "")
    first, why, *_ = again.stdout.splitlines()
    assert first == "Nothing to do."
    assert why.startswith("Ended at step 24 by --stop_after_no_gain 3")
    assert f"--resume {run} --stop_after_no_gain 6\n" in again.stdout
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert {**after, run: 0} == {**before, run: 0}  # It was locked for a moment.

    # It counts on from there.
    correct.update({27: 50, 30: 60})
    more = {**STOPPED, "stop_after_no_gain": 5, "schedule": "linear"}
    assert train(run, stand_in_dir, num_gpus=1, deterministic=False, **more) == 30
    best = (
        "last 5 evaluations were not above the best, precision @ 1 = 0.300 at step 15"
    )
    assert best in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_smaller_number_may_have_been_reached_already(
    tmp_path, stand_in_dir, correct, capsys
):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**STOPPED, "max_steps": 22, "checkpoint_steps": 100}
    assert train(run, stand_in_dir, **options) == 22
    assert "Best:   precision @ 1 = 0.300 at step 15" in capsys.readouterr().out
    options |= {"max_steps": 100, "stop_after_no_gain": 2}
    assert train(run, stand_in_dir, **options) == 22
    assert "Nothing to do.\nEnded at step 22 by" in capsys.readouterr().out
    # Who follows the run has to know.
    settings = json.loads((run / "config.json").read_text())
    assert settings["stop_after_no_gain"] == 2


def test_a_run_has_one_best_and_keeps_it(tmp_path, stand_in_dir, correct, capsys):
    """Of equal scores the earlier one, also if it was scored between checkpoints."""
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    options = {**STOPPED, "checkpoint_steps": 10, "keep_checkpoints": 1}
    train(run, stand_in_dir, **options, keep_best=1)
    assert saved(run) == [15, 24]
    said = capsys.readouterr().out
    assert re.findall(r"step (\d+): .*the best so far", said) == ["6", "15"]
    assert set(re.findall(r"best (?:.* )?at step (\d+)", said)) == {"6", "15"}
    assert "--keep_best" not in said
    assert f"cifar10.evaluate('{run}', step=15)" in said
    assert restoring.candidates(run / "checkpoints", "best") == [15]
    assert record.read(run, 24, 1.0, PythonConfig()).best[0] == 15
    (read,) = run_files.read_all([run])
    assert read.best["step"] == 15


@pytest.mark.slow
def test_the_last_words_name_the_best_of_a_run_that_reached_its_end(
    tmp_path, stand_in_dir, correct, capsys, monkeypatch
):
    """Also one that `eval.py` scored, and one that is not kept."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    correct.update(RISING_AND_FALLING)
    options = {**STOPPED, "max_steps": 12, "keep_checkpoints": 1}
    del options["stop_after_no_gain"]
    for keep, words in (
        (1, f"export --output best_model --step 6 --train_dir {tmp_path / 'run'}"),
        (0, "Its checkpoint was not kept; --keep_best 1 would"),
    ):
        options |= {"keep_best": keep, "fresh": True}
        train(tmp_path / "run", stand_in_dir, **options)
        said = " ".join(capsys.readouterr().out.split())
        assert "Best: precision @ 1 = 0.250 at step 6" in said
        assert words in said
        assert ("best_model" in said) == (keep == 1)
    scores.append(tmp_path / "run" / "eval", 12, {"precision @ 1": 1.0}, IMAGES)
    train(tmp_path / "run", stand_in_dir, **options | {"fresh": False})
    said = capsys.readouterr().out
    assert "Nothing to do" in said
    assert "Best:   precision @ 1 = 1.000 at step 12" in said
    assert "--step 12 --train_dir" in said


@pytest.mark.slow
def test_scores_of_eval_decide_nothing(tmp_path, stand_in_dir, correct):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    train(run, stand_in_dir, **{**STOPPED, "max_steps": 11})
    scores.append(run / "eval", 11, {"precision @ 1": 1.0}, IMAGES)
    assert train(run, stand_in_dir, **STOPPED) == 24


@pytest.mark.slow
def test_a_log_that_is_lost_decides_nothing(tmp_path, stand_in_dir, correct):
    correct.update(RISING_AND_FALLING)
    run = tmp_path / "run"
    train(run, stand_in_dir, **{**STOPPED, "max_steps": 20})
    (run / "eval" / "metrics.jsonl").unlink()
    assert train(run, stand_in_dir, **STOPPED) == 24


# ---- The count


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], Gains()),
        ([0], Gains(0, 10, 1, 0)),
        ([0, 0], Gains(0, 10, 1, 1)),
        ([5, 6, 6, 5], Gains(6, 10, 2, 2)),
        ([5, 4, 3, 6], Gains(6, 10, 4, 0)),
    ],
)
def test_a_gain_is_a_higher_score(found, expected):
    counted = Gains()
    for step, correct in enumerate(found, 1):
        counted = counted.after(step, correct, 10)
    assert counted == expected
    assert gains.of(counted.facts()) == expected
    assert not counted.have_ended(None)
    assert not counted.have_ended(expected.without_gain + 1)
    assert counted.have_ended(expected.without_gain)


GOOD = {"correct": 1, "images": 2, "step": 3, "without_gain": 0}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        5,
        [1, 2, 3, 4],
        "best",
        {**GOOD, "more": 1},
        *(
            GOOD | {name: odd}
            for name in GOOD
            for odd in (None, -1, 1.5, True, "1", 10**15, [])
        ),
        GOOD | {"correct": 3},
        GOOD | {"images": 0, "correct": 0, "without_gain": 1},
    ],
)
def test_a_manifest_of_another_kind_is_damage(tmp_path, entry):
    checkpoints.save(tmp_path, {}, step=1, facts={"validation": GOOD})
    assert gains.of(checkpoints.verify(tmp_path, 1).manifest).correct == 1
    checkpoints.save(tmp_path, {}, step=2, facts={"validation": entry})
    with pytest.raises(checkpoints.DamagedError):
        checkpoints.verify(tmp_path, 2)


# ---- Flags


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eval_steps": 0}, "--eval_steps 0: the minimum is 1"),
        ({"eval_steps": -5}, "--eval_steps -5: the minimum is 1"),
        (
            {"eval_steps": 11, "max_steps": 10},
            "--eval_steps 11: the training ends before, at --max_steps 10",
        ),
        (
            {"eval_steps": 3, "steps_per_call": 4},
            "--steps_per_call 4: --eval_steps asks for something every 3 steps",
        ),
        ({"stop_after_no_gain": 5}, "--stop_after_no_gain 5: it counts the training's"),
        (
            {"stop_after_no_gain": 0, "eval_steps": 5},
            "--stop_after_no_gain 0: the minimum is 1",
        ),
        (
            {"stop_after_no_gain": -1, "eval_steps": 5},
            "--stop_after_no_gain -1: the minimum is 1",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(options, said):
    with pytest.raises(UsageError) as refused:
        Config(**options)
    assert said in str(refused.value)


def test_flags_on_the_border_are_taken():
    least = Config(eval_steps=1, stop_after_no_gain=1, steps_per_call=1)
    assert least.periods["eval_steps"] == 1
    Config(eval_steps=10, max_steps=10, steps_per_call=10)
    assert "eval_steps" not in Config().periods
