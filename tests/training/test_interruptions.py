"""What happens to a run from outside: a folder gone, a closed pipe, foreign files."""

import shlex
import shutil
import signal
import subprocess
import sys

import keras
import pytest

import runs
import small_model
from cifar10 import model as models
from cifar10.config import cli
from cifar10.config.signals import StopSignals
from cifar10.errors import StoppedError, UsageError
from cifar10.run_directory import checkpoints
from cifar10.training import console, train as training


@pytest.fixture
def train(tmp_path, stand_in_dir):
    """Trains four steps in a directory, and saves every second one."""
    options = {"num_gpus": 1, "batch_size": 4, "max_steps": 4, "checkpoint_steps": 2}
    return lambda name, **more: runs.train(
        tmp_path / name, stand_in_dir, **options | more
    )


# ---- Checkpoints of another run


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"seed": 1}, {"batch_size": 8}], ids=str)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, train, other):
    train("mine")
    train("other", **other)
    mine = tmp_path / "mine" / "checkpoints"
    theirs = tmp_path / "other" / "checkpoints" / "step-00000004"
    shutil.rmtree(mine / "step-00000004")
    shutil.copytree(theirs, mine / "step-00000004")

    with pytest.raises(UsageError, match="step-00000004"):
        train("mine", max_steps=6)

    shutil.rmtree(mine / "step-00000004")
    train("mine", max_steps=6)


def test_as_many_towers_are_needed_where_each_has_statistics_of_its_own(
    train, monkeypatch
):
    def normed(*arguments):
        model = small_model.two_layers(*arguments)
        model.add(keras.layers.BatchNormalization())
        return model

    monkeypatch.setitem(models.REGISTRY, "normed", normed)
    train("run", model="normed", max_steps=1)
    with pytest.raises(UsageError, match="batch_size: 4 there, 2 now"):
        train("run", model="normed", max_steps=2, num_gpus=2, batch_size=2)


# ---- The directory vanishes


def test_a_directory_that_vanishes_stops_the_run_and_is_not_made_anew(
    tmp_path, train, monkeypatch, capsys
):
    train_dir = tmp_path / "run"
    advance = console.Console.on_step

    def vanish(shown, step):
        advance(shown, step)
        if step == 3:
            shutil.rmtree(train_dir)

    monkeypatch.setattr(console.Console, "on_step", vanish)
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: train("run"))
    assert ended.value.code == 2
    assert str(train_dir) in capsys.readouterr().err
    assert not train_dir.exists()


# ---- A closed pipe


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_costs_the_lines(tmp_path, stand_in_dir):
    """As in `python train.py | head -1`."""
    words = runs.training_flags(
        tmp_path / "run", stand_in_dir, batch_size=1, log_frequency=1
    )
    with runs.started(runs.ROOT / "train.py", *words) as process:
        assert process.stdout.readline().startswith("Towers: ")
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert runs.checkpoint(tmp_path / "run", 30).is_dir()
    assert complaint.count("Broken pipe") == 1
    assert "Traceback" not in complaint


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_streams_that_are_absent_or_full_cost_the_lines(tmp_path, stand_in_dir, closed):
    """As a user's Python starts: what it finds closed is its own matter."""
    flags = runs.training_flags(tmp_path / "run", stand_in_dir)
    words = shlex.join([sys.executable, str(runs.ROOT / "train.py"), *flags])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{words} {closed}"],
        capture_output=True,
        check=False,
        env=runs.of_a_user(),
    )
    assert done.returncode == 0
    # Nothing that libraries print went into a file of the run.
    checkpoints.verify(tmp_path / "run" / "checkpoints", 30)
    assert len(runs.logged(tmp_path / "run")) == 3


# ---- What is said of a run without a step, or without a checkpoint


class AlreadyRequested(StopSignals):
    def defer(self):
        super().defer()
        self.requested = signal.SIGTERM


def test_a_signal_at_step_0_saves_nothing_and_says_so(tmp_path, train, monkeypatch):
    monkeypatch.setattr(training, "StopSignals", AlreadyRequested)
    with pytest.raises(StoppedError, match="SIGTERM after step 0") as stopped:
        train("run")
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "run" / "checkpoints").exists()
