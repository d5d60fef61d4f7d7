"""Following a run: which checkpoints are scored, and when it ends."""

import json
import shutil
import time

import numpy as np
import pytest
import tensorflow as tf

import runs
import scored_runs
from cifar10.config import config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.evaluation import evaluate, scored_set
from cifar10.evaluation.eval_command import Options
from cifar10.follower import followed_run
from cifar10.run_directory import checkpoints, scores


@pytest.fixture
def run_dir(tmp_path):
    """A run that is to end at step 30 and has no checkpoint yet."""
    added = {"parameters": 1, "simulated": False, "global_batch_size": 128}
    settings = {**config.Config().values, **added, "max_steps": 30, "data_dir": "."}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def save(run_dir, step, **facts):
    variables = {"value": tf.Variable(float(step)), "global_step": tf.Variable(step)}
    facts = {"seed": 0, "global_batch_size": 128, **facts}
    return checkpoints.save(run_dir / "checkpoints", variables, step=step, facts=facts)


@pytest.fixture
def follow(run_dir, monkeypatch):
    """Follows the run with a simple model and scorer; returns the steps it scored.

    `while_waiting` and `while_scoring` are called instead of sleeping and of scoring,
    one entry a time, and play the training; what the last of them return is the score.
    """

    class TrainedModel:
        def __init__(self, directory, *_, **__):
            self.run = RecordedRun.read(directory)
            self.model, self.trainable = None, [tf.Variable(0.0)]

        def load(self, checkpoint):
            step = tf.Variable(0)
            found = {"value": self.trainable[0], "global_step": step}
            checkpoints.restore(checkpoint, found)
            self.temperature = 1.0

        def is_recalibrated(self):
            return False

    class Scorer:
        augments = False

        def __init__(self, *_, **__):
            pass

        def score(self, values, batches, *_, **__):
            found = next(follow.scores, lambda: None)()
            follow.scored.append(int(values[0]))
            follow.batch = next(iter(batches))
            each = np.arange(10)
            return found or correct(10)._replace(labels=each, predictions=each), 0.0

    class Dataset:
        classes, name, is_real, description = 10, "none", False, "no data"
        class_names = tuple("abcdefghij")
        splits = ("train", "test")

        def read(self, split):
            label = {"test": 3, "train": 7}[split]
            return np.zeros((1, 32, 32, 3), np.uint8), np.array([label], np.int32)

    def follow(*, while_waiting=(), while_scoring=(), **options):
        waits, follow.scores = iter(while_waiting), iter(while_scoring)
        follow.scored = []
        monkeypatch.setattr(followed_run, "TrainedModel", TrainedModel)
        monkeypatch.setattr(scored_set, "Scorer", Scorer)
        monkeypatch.setattr(evaluate.datasets, "find_again", lambda *_, **__: Dataset())
        monkeypatch.setattr(evaluate.datasets, "is_of_run", lambda *_: True)
        monkeypatch.setattr(evaluate.devices, "place_evaluation", str)
        monkeypatch.setattr(time, "sleep", lambda seconds: next(waits)())
        arguments = {"train_dir": str(run_dir), **options}
        given = Options(**arguments)
        evaluator = evaluate.Evaluator(given)
        for step in evaluator.follow(given.eval_interval_secs, once=given.once):
            evaluator.score(step)
        return follow.scored

    return follow


def settle(run_dir, **settings):
    """Changes the run's `config.json`."""
    path = run_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def correct(count):
    """Returns outcomes of ten images, of which some are recognized."""
    return scored_runs.outcomes(count, 10)


def score(run_dir, precisions):
    """Notes scores by step."""
    (run_dir / "eval").mkdir(exist_ok=True)
    for step, precision in precisions.items():
        scalars = {"precision @ 1": precision}
        scores.append(run_dir / "eval", step, scalars, 10)


def test_each_newest_checkpoint_is_scored_once_until_the_run_ends(
    run_dir, follow, capsys
):
    scored = follow(
        while_waiting=[
            lambda: None,
            lambda: save(run_dir, 10),
            lambda: None,
            lambda: (save(run_dir, 15), save(run_dir, 20)),
            lambda: save(run_dir, 30),
        ]
    )
    assert scored == [10, 20, 30]
    said = capsys.readouterr().err
    assert said.count("no checkpoint") == said.count("next checkpoint") == 1
    assert "finished at step 30" in said


def test_eval_data_selects_the_images_to_score(run_dir, follow):
    save(run_dir, 30)
    for eval_data, label in (("test", 3), ("train_eval", 7)):
        follow(run_once=True, eval_data=eval_data)
        _, labels, _ = follow.batch
        assert labels.numpy().tolist() == [label]


def test_images_are_prepared_as_in_the_run(run_dir, follow):
    save(run_dir, 30)
    for kind, side in (("tutorial", 24), ("flip_translate", 32)):
        settle(run_dir, distortions=kind)
        follow(run_once=True)
        images, _, _ = follow.batch
        assert images.shape == (1, side, side, 3)


def test_damaged_and_foreign_checkpoints_are_named_once_and_passed_over(
    run_dir, follow, capsys
):
    save(run_dir, 10)
    (save(run_dir, 15) / "state.index").write_bytes(b"")
    save(run_dir, 20, seed=1)
    scored = follow(while_waiting=[lambda: None, lambda: save(run_dir, 30)])
    assert scored == [10, 30]
    said = capsys.readouterr().err
    assert said.count("step 15 is refused") == said.count("step 20 is refused") == 1


def test_a_checkpoint_deleted_during_scoring_keeps_its_score(run_dir, follow):
    save(run_dir, 10)

    def train_on():
        save(run_dir, 30)
        checkpoints.delete(run_dir / "checkpoints", 10)

    scored = follow(while_scoring=[train_on], while_waiting=[lambda: None])
    assert scored == [10, 30]
    assert [line["step"] for line in runs.logged(run_dir / "eval")] == [10, 30]


def test_following_continues_when_a_run_is_extended(run_dir, follow):
    save(run_dir, 30)
    scored = follow(
        while_scoring=[lambda: settle(run_dir, max_steps=40)],
        while_waiting=[lambda: save(run_dir, 40)],
    )
    assert scored == [30, 40]


def test_a_new_run_of_the_same_length_is_scored(run_dir, follow):
    def replace():
        shutil.rmtree(run_dir / "checkpoints")
        settle(run_dir, seed=1)
        save(run_dir, 30, seed=1)

    save(run_dir, 30)
    assert follow(while_scoring=[replace]) == [30, 30]


def test_a_shorter_run_is_scored_beside_the_old_runs_checkpoints(run_dir, follow):
    def replace():
        settle(run_dir, seed=1, max_steps=20)
        save(run_dir, 10, seed=1)

    save(run_dir, 30)
    scored = follow(
        while_scoring=[replace],
        while_waiting=[lambda: save(run_dir, 20, seed=1)],
    )
    assert scored == [30, 10, 20]


def test_a_run_ended_by_stop_after_no_gain_has_finished(run_dir, follow):
    settle(run_dir, eval_steps=10, stop_after_no_gain=2)
    best = {"best_by": "precision @ 1", "score": 0.5, "images": 2, "step": 5}
    counts = [{**best, "without_gain": n} for n in (1, 2)]
    scored = follow(
        while_waiting=[
            lambda: save(run_dir, 10, validation=counts[0]),
            lambda: save(run_dir, 20, validation=counts[1]),
        ]
    )
    assert scored == [10, 20]


def test_followed_checkpoints_print_a_line_and_run_once_prints_a_table(
    run_dir, follow, capsys
):
    save(run_dir, 10)
    follow(
        while_waiting=[lambda: save(run_dir, 20), lambda: save(run_dir, 30)],
        while_scoring=[lambda: correct(3), lambda: correct(5), lambda: correct(4)],
    )
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "step 10: precision @ 1 = 0.300 [0.108, 0.603] (chance: 0.100)",
        "step 20: precision @ 1 = 0.500 [0.237, 0.763] (chance: 0.100)",
        "step 30: precision @ 1 = 0.400 [0.168, 0.687] (chance: 0.100)",
    ]
    follow(run_once=True, while_scoring=[lambda: correct(4)])
    written = capsys.readouterr().out
    assert written.partition(" ")[2].startswith(lines[-1].partition(" ")[2])
    assert written.count("recall") == 1


def test_the_requested_or_the_best_remaining_step_is_scored_once(
    run_dir, follow, capsys
):
    for saved in (10, 20, 25):  # The training goes on.
        save(run_dir, saved)
    score(run_dir, {10: 0.5, 20: 0.5, 25: 0.4})
    for step, expected in (("20", 20), ("best", 10)):
        scored = follow(step=step, while_scoring=[lambda: correct(5)])
        assert scored == [expected]
        written, said = capsys.readouterr()
        assert f"step {expected}: precision @ 1 = " in written
        assert written.count("recall") == 1
        assert said == ""
    shutil.rmtree(run_dir / "checkpoints" / "step-00000010")
    score(run_dir, {20: 0.3})
    assert follow(step="best") == [25]


def test_an_unusable_step_is_refused_with_the_usable_steps(run_dir, follow):
    save(run_dir, 10)
    (save(run_dir, 20) / "manifest.json").write_text("{}")
    for step, named in (
        ("15", "10, 20"),
        ("best", "no checkpoint has a score"),
        ("20", "manifest"),
    ):
        with pytest.raises(UsageError, match=named):
            follow(step=step)


def test_nothing_is_written_to_a_linked_folder(follow, run_dir, tmp_path):
    save(run_dir, 10)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run_dir / "eval").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="link"):
        follow(run_once=True)
    assert not any(elsewhere.iterdir())
    assert follow(run_once=True, eval_dir=str(run_dir / "eval")) == [10]
    with pytest.raises(UsageError, match="--eval_dir"):
        follow(run_once=True, eval_dir=str(run_dir / "config.json" / "deeper"))


def test_scores_in_another_folder_of_the_run_are_refused(
    follow, run_dir, tmp_path_factory
):
    """They would count as scores of the test split, or as lines of the run's log."""
    save(run_dir, 10)
    for split, folder in (("train_eval", "eval"), ("test", "."), ("test", "train")):
        with pytest.raises(UsageError, match=r"--eval_dir .* of the run"):
            follow(run_once=True, eval_data=split, eval_dir=str(run_dir / folder))
    outside = tmp_path_factory.mktemp("e")
    (outside / "link").symlink_to(run_dir)
    (outside / "inner").symlink_to(run_dir / "checkpoints")
    for folder in ("link/eval_val", "link/checkpoints/10", "inner/mine"):
        with pytest.raises(UsageError, match=r"--eval_dir .* of the run"):
            follow(run_once=True, eval_dir=str(outside / folder))
    for folder in (outside, outside / "link" / "eval", run_dir / "mine"):
        assert follow(run_once=True, eval_dir=str(folder)) == [10]


def test_scores_in_the_folders_of_another_run_are_refused(
    follow, run_dir, tmp_path_factory
):
    save(run_dir, 10)
    other = tmp_path_factory.mktemp("runs") / "other"
    shutil.copytree(run_dir, other)
    for folder in (other, other / "eval", other / "train" / "mine"):
        with pytest.raises(UsageError, match=r"--eval_dir .* of the run"):
            follow(run_once=True, eval_dir=str(folder))


def test_an_unusable_directory_is_refused(follow, run_dir):
    with pytest.raises(UsageError, match="no checkpoint"):
        follow(run_once=True)
    save(run_dir, 10)
    (run_dir / "config.json").unlink()
    (run_dir / "config.json").mkdir()  # Even root cannot read a folder.
    with pytest.raises(UsageError, match="config"):
        follow()
