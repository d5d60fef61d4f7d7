"""Following a training: which checkpoints are scored, and when it ends."""

import json
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

from cifar10.config import config
from cifar10.errors import UsageError
from cifar10.evaluation import evaluate
from cifar10.run_directory import checkpoints, retention


@pytest.fixture
def run_dir(tmp_path):
    """A run that is to end at step 30 and has no checkpoint yet."""
    added = {"parameters": 1, "simulated": False, "global_batch_size": 128}
    settings = {**vars(config.Config()), **added, "max_steps": 30, "data_dir": "."}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def save(run_dir, step):
    variable = {"value": tf.Variable(float(step))}
    return checkpoints.save(run_dir / "checkpoints", variable, step=step, facts={})


@pytest.fixture
def follow(run_dir, monkeypatch):
    """Follows the run with a pretended evaluator; returns the steps it scored.

    `while_waiting` and `while_scoring` are called instead of sleeping and evaluating,
    one entry a time, and play the training.
    """

    def follow(*, while_waiting=(), while_scoring=(), **options):
        waits, scores, scored = iter(while_waiting), iter(while_scoring), []

        class Evaluator:
            def __init__(self, *arguments):
                pass

            def score(self, checkpoint):
                next(scores, lambda: None)()
                if not checkpoint.path.is_dir():
                    raise FileNotFoundError(checkpoint.path)
                scored.append(checkpoint.step)

        monkeypatch.setattr(evaluate, "_Evaluator", Evaluator)
        monkeypatch.setattr(evaluate.devices, "place_evaluation", str)
        monkeypatch.setattr(evaluate.time, "sleep", lambda seconds: next(waits)())
        arguments = {"checkpoint_dir": str(run_dir), **options}
        evaluate.run(evaluate.Options(**arguments))
        return scored

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


def test_a_checkpoint_that_vanishes_is_said_and_skipped(run_dir, follow, capsys):
    save(run_dir, 10)

    def replace():
        save(run_dir, 30)
        shutil.rmtree(run_dir / "checkpoints" / "step-00000010")

    assert follow(while_scoring=[replace]) == [30]
    assert "step 10 vanished" in capsys.readouterr().err


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


def test_a_damaged_checkpoint_is_named_once_and_passed_over(run_dir, follow, capsys):
    save(run_dir, 10)
    (save(run_dir, 20) / "state.index").write_bytes(b"")
    scored = follow(
        while_waiting=[lambda: None, lambda: None, lambda: save(run_dir, 30)]
    )
    assert scored == [10, 30]
    assert capsys.readouterr().err.count("PASSING OVER the damaged") == 1


def test_it_says_once_what_it_waits_for(run_dir, follow, capsys):
    follow(while_waiting=[lambda: None, lambda: None, lambda: save(run_dir, 30)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "no checkpoint" in said[0]
    assert "Looking every 30 s" in said[0]
    assert "finished at step 30" in said[1]


@pytest.mark.parametrize("run_once", [False, True])
def test_a_directory_that_may_not_be_read_is_refused(
    follow, run_dir, monkeypatch, run_once
):
    save(run_dir, 10)
    config_json = run_dir / "config.json"
    (run_dir / "elsewhere").mkdir()
    config_json.unlink()
    config_json.symlink_to(run_dir / "elsewhere")  # Even root cannot read a folder.
    with pytest.raises(UsageError) as caught:
        follow(run_once=run_once)
    assert f"{run_dir}/config.json cannot be read: Is a directory" in str(caught.value)
    assert "Make it readable" in str(caught.value)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    for reading in ("read_bytes", "exists", "is_dir"):
        monkeypatch.setattr(Path, reading, refuse)
    with pytest.raises(UsageError, match=r"config\.json cannot be read: Permission"):
        follow(run_once=run_once)


@pytest.mark.parametrize("run_once", [False, True])
def test_a_file_as_directory_is_refused(follow, run_dir, run_once):
    with pytest.raises(
        UsageError, match=r"config\.json cannot be read: Not a directory"
    ):
        follow(checkpoint_dir=str(run_dir / "config.json"), run_once=run_once)


def test_checkpoints_that_may_not_be_looked_into_are_refused(follow, run_dir):
    folder = run_dir / "checkpoints"
    folder.symlink_to(folder)  # A link to itself cannot be followed, by root either.
    with pytest.raises(UsageError, match="checkpoints cannot be read: Too many levels"):
        follow(run_once=True)


def test_once_without_a_checkpoint_is_refused(follow, run_dir):
    with pytest.raises(UsageError, match=f"no checkpoint in {run_dir}"):
        follow(run_once=True)
