"""Trainings whose length is given in epochs or in hours."""

import json
import signal

import keras
import numpy as np
import pytest

import cifar10
import runs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.follower.followed_run import FollowedRun
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints
from cifar10.training import train as training

RANDOM = np.random.default_rng(0)
# 96 images are 6 steps of 16.
DATA = RANDOM.integers(0, 256, (96, 32, 32, 3), np.uint8), np.arange(96) % 10
OPTIONS = {
    "model": runs.SMALL,
    "data": "npz",
    "precision": "float32",
    "deterministic": True,
    "num_gpus": 1,
    "global_batch_size": 16,
    "checkpoint_steps": 4,
    "keep_checkpoints": 9,
    "log_frequency": 1,
    "summary_steps": 1000,
}


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set.npz"
    images, labels = DATA
    arrays = {"x_train": images, "y_train": labels}
    np.savez(path, **arrays, x_test=images[:20], y_test=labels[:20])
    return path


@pytest.fixture
def train(tmp_path, npz):
    """Trains in a folder; returns the step reached and the folder."""

    def train(name, stop=None, **options):
        keras.backend.clear_session(free_memory=False)
        run = tmp_path / name
        given = {**OPTIONS, "data_dir": str(npz), "train_dir": str(run), **options}
        return training.train(Config(**given), stop), run

    return train


class Stopped(StopSignals):
    """Requests the end before the first step."""

    def __init__(self):
        super().__init__()
        self.requested = signal.SIGTERM


def recorded(run):
    return json.loads((run / "config.json").read_text())


def weights(run, step):
    return runs.files(runs.checkpoint(run, step))


def test_epochs_are_converted_to_steps_on_every_resume(train, capsys):
    linear = {"schedule": "linear"}
    step, whole = train("whole", max_steps=9, **linear)
    rates = [line["learning_rate"] for line in runs.logged(whole)]
    assert step == 9
    step, run = train("run", max_epochs=1.5, **linear)
    assert (step, recorded(run)["max_steps"], recorded(run)["max_epochs"]) == (
        9,
        9,
        1.5,
    )
    assert [line["learning_rate"] for line in runs.logged(run)] == rates
    assert weights(run, 9) == weights(whole, 9), "the schedule ends where it ends"
    # As if it had been killed after the first checkpoint: with other towers, too.
    checkpoints.delete(run / "checkpoints", 9)
    checkpoints.delete(run / "checkpoints", 8)
    assert train("run", max_epochs=1.5, num_gpus=2, **linear)[0] == 9
    assert [line["learning_rate"] for line in runs.logged(run)] == rates
    capsys.readouterr()
    assert train("run", max_epochs=1.5, **linear)[0] == 9
    assert "Nothing to do" in capsys.readouterr().out
    # Another end is another schedule.
    with pytest.raises(UsageError, match=r"max_epochs: 1\.5 there, 2 now"):
        train("run", max_epochs=2, **linear)
    done = runs.call("train.py", f"--resume={run}")
    assert (done.returncode, "Nothing to do" in done.stdout) == (0, True), done.stderr
    assert f"--initial_weights {run}" in done.stdout, "its rate has fallen to zero"


def test_a_run_continues_for_more_epochs(train):
    step, run = train("run", max_epochs=1)
    assert step == 6
    done = runs.call("train.py", f"--resume={run}", "--max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert checkpoints.steps(run / "checkpoints")[-1] == 12
    assert recorded(run)["max_steps"] == 12
    done = runs.call("train.py", f"--resume={run}", "--max_epochs=1")
    assert f"--resume {run} --max_steps 24" in done.stdout, done.stderr
    done = runs.call("train.py", f"--resume={run}", "--max_steps=13")
    assert done.returncode == 0, done.stderr
    assert (recorded(run)["max_steps"], recorded(run)["max_epochs"]) == (13, None)


@pytest.mark.usefixtures("an_hour_a_step")
def test_hours_count_over_resumes(train, capsys):
    step, whole = train("whole", max_hours=6.0)
    last = checkpoints.steps(whole / "checkpoints")[-1]
    assert step == last == 7, "the step in which the time ended is the last"
    said = capsys.readouterr().out
    assert "6 hours" in said
    assert "--max_hours" in said.rpartition("Ended at step 7")[2].splitlines()[0]
    # Killed after step 4, it goes on from there, with the hours until there.
    _, run = train("run", max_hours=6.0)
    checkpoints.delete(run / "checkpoints", 7)
    assert train("run", max_hours=6.0)[0] == 7
    ours, theirs = weights(run, 7), weights(whole, 7)
    assert ours == theirs
    # It has ended, and who follows it knows.
    capsys.readouterr()
    assert train("run", max_hours=6.0)[0] == 7
    assert "--max_hours is 6" in capsys.readouterr().out
    follower = FollowedRun(run, "/cpu:0", None)
    follower._prepare = lambda model: None
    follower._use = lambda model, checkpoint: None
    follower.look()
    assert follower.has_finished
    assert train("run", max_hours=8.0)[0] == 9
    # Steps that no limit of hours ended took their time, too.
    _, run = train("steps", max_steps=3)
    assert train("steps", max_hours=6.0)[0] == 7
    assert not follower.has_finished or follower.look()
    assert train("run", max_steps=10)[0] == 10


def test_a_run_without_time_takes_one_step(train, tmp_path):
    assert train("run", max_hours=1e-6)[0] == 1
    run = tmp_path / "run"
    done = runs.call("train.py", f"--resume={run}")
    assert (done.returncode, "Nothing to do" in done.stdout) == (0, True), done.stderr
    assert f"--resume {run} --max_steps 2" in done.stdout
    before = beginning(run)
    assert train("run", max_hours=1e-6)[0] == 1
    assert beginning(run) == before, "it was begun once more"


def beginning(run):
    """What each start of a run writes."""
    return [(run / name).read_bytes() for name in ("config.json", "starts.jsonl")]


def test_a_run_that_has_ended_begins_only_at_a_new_end(train):
    _, run = train("run", max_steps=5)
    before = beginning(run)
    # It has ended already, whatever the limit is now.
    assert train("run", max_hours=1e-6)[0] == 5
    assert train("run", max_steps=4)[0] == 5
    assert beginning(run) == before
    checkpoints.delete(run / "checkpoints", 5)  # Killed before its end.
    assert train("run", max_hours=1e-6)[0] == 4
    assert recorded(run)["max_hours"] == 1e-6
    assert beginning(run)[1].count(b"\n") == 2
    before = beginning(run)
    assert train("run", max_hours=1e-6)[0] == 4
    assert beginning(run) == before
    assert train("run", max_steps=6)[0] == 6
    assert beginning(run)[1].count(b"\n") == 3


def test_a_record_says_why_training_ended(tmp_path):
    config = Config(
        **{**OPTIONS, "data": DATA, "max_epochs": 0.5, "train_dir": str(tmp_path / "a")}
    )
    assert cifar10.train(config).ended == "max_epochs"
    config = Config(
        **{**OPTIONS, "data": DATA, "max_hours": 1e-6, "train_dir": str(tmp_path / "b")}
    )
    assert cifar10.train(config).ended == "max_hours"
