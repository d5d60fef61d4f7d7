"""What happens to a run from outside: a folder gone, foreign files, a signal."""

import shutil
import signal

import keras
import pytest

import runs
import small_model
from cifar10.errors import StoppedError, UsageError
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.process import entry_point
from cifar10.process.signals import StopSignals
from cifar10.training import periodic, train as training


@pytest.fixture
def train(tmp_path, stand_in_dir):
    """Trains four steps in a directory, and saves every second one."""
    options = {"num_gpus": 1, "batch_size": 4, "max_steps": 4, "checkpoint_steps": 2}
    return lambda name, **more: runs.train(
        tmp_path / name, stand_in_dir, **options | more
    )


@pytest.mark.slow
def test_a_checkpoint_from_another_run_is_refused(tmp_path, train):
    train("mine")
    train("other", seed=1)
    mine = tmp_path / "mine" / "checkpoints"
    theirs = tmp_path / "other" / "checkpoints" / "step-00000004"
    shutil.rmtree(mine / "step-00000004")
    shutil.copytree(theirs, mine / "step-00000004")
    with pytest.raises(UsageError, match="step-00000004"):
        train("mine", max_steps=6)
    shutil.rmtree(mine / "step-00000004")
    train("mine", max_steps=6)


def test_a_resume_with_batch_norm_needs_the_same_batch_per_tower(train, monkeypatch):
    def normed(*arguments):
        model = small_model.two_layers(*arguments)
        normed = keras.layers.BatchNormalization()(model.output)
        return keras.Model(model.inputs, normed)

    monkeypatch.setitem(ARCHITECTURES, "normed", Architecture(normed))
    train("run", model="normed", max_steps=1)
    with pytest.raises(UsageError, match="batch_size: 4 there, 2 now"):
        train("run", model="normed", max_steps=2, num_gpus=2, batch_size=2)


def test_a_vanished_directory_stops_the_run_and_is_not_recreated(
    tmp_path, train, monkeypatch, capsys
):
    train_dir = tmp_path / "run"
    log = periodic.Log.on_step

    def vanish(hook, step):
        if step == 3:
            shutil.rmtree(train_dir)
        log(hook, step)

    monkeypatch.setattr(periodic.Log, "on_step", vanish)
    with pytest.raises(SystemExit) as ended:
        entry_point.run_program(lambda: train("run"))
    assert ended.value.code == 2
    assert str(train_dir) in capsys.readouterr().err
    assert not train_dir.exists()


class AlreadyRequested(StopSignals):
    def defer(self):
        super().defer()
        self.requested = signal.SIGTERM


def test_a_signal_at_step_0_is_reported_and_saves_nothing(tmp_path, train, monkeypatch):
    monkeypatch.setattr(training, "StopSignals", AlreadyRequested)
    with pytest.raises(StoppedError, match="SIGTERM after step 0") as stopped:
        train("run")
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "run" / "checkpoints").exists()
