"""Flags that change how fast a training runs, and not where it ends."""

import contextlib
import io
import json

import keras
import pytest

import runs
from cifar10.errors import UsageError


def train(train_dir, data_dir, **options):
    """Trains 12 steps on the stand-in; returns the last checkpoint's variables."""
    defaults = {
        "num_gpus": 1,
        "batch_size": 8,
        "max_steps": 12,
        "checkpoint_steps": 8,
        "log_frequency": 4,
        "summary_steps": 100,
    }
    return runs.train(train_dir, data_dir, **{**defaults, **options})


def losses(train_dir):
    """Returns the lines of the log without what differs between equal runs."""
    times = {"examples_per_sec", "time", "seconds"}
    lines = runs.logged(train_dir)
    return [{name: line[name] for name in line.keys() - times} for line in lines]


def profiles(train_dir):
    return [*(train_dir / "train").rglob("*.xplane.pb")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, stand_in_dir):
    """A run in single steps: its folder and its last values."""
    train_dir = tmp_path_factory.mktemp("straight") / "run"
    return train_dir, train(train_dir, stand_in_dir, profile="10:60")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, stand_in_dir):
    """A run in calls of several steps that goes on in single ones; the same, output."""
    train_dir = tmp_path_factory.mktemp("resumed") / "run"
    train(train_dir, stand_in_dir, max_steps=8, steps_per_call=4)
    measures = {"report_bottleneck": True, "profile": "9:10"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        values = train(train_dir, stand_in_dir, **measures)
    return train_dir, values, output.getvalue()


def test_a_run_in_calls_of_several_steps_resumes_in_single_ones(straight, resumed):
    runs.assert_equal(resumed[1], straight[1])
    # The losses' averages go on.
    assert losses(resumed[0]) == losses(straight[0])


def test_a_report_divides_the_step_and_profiles_are_written(straight, resumed):
    assert "A step took" in resumed[2]
    # Also of a part that goes on beyond the end.
    assert len(profiles(resumed[0])) == len(profiles(straight[0])) == 1


def test_a_profile_beyond_the_end_is_said(tmp_path, stand_in_dir, capsys):
    train(tmp_path / "run", stand_in_dir, max_steps=1, profile="50:60")
    assert not profiles(tmp_path / "run")
    assert "step 50" in capsys.readouterr().out
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["precision"] == "float32", "auto, without oneDNN"


@pytest.mark.slow
def test_float16_resumes_with_its_loss_scale(tmp_path, stand_in_dir):
    straight = train(tmp_path / "straight", stand_in_dir, precision="float16")
    assert runs.logged(tmp_path / "straight")[-1]["loss_scale"] > 1
    train(tmp_path / "resumed", stand_in_dir, precision="float16", max_steps=8)
    resumed = train(tmp_path / "resumed", stand_in_dir, precision="float16")
    assert any("scale" in name for name in straight)
    runs.assert_equal(resumed, straight)


def pooled(image_shape, classes):
    layers = [keras.layers.Conv2D(2, 3), keras.layers.MaxPooling2D(3, 2)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2])
def test_layers_that_xla_cannot_compile_are_named(tmp_path, stand_in_dir, towers):
    with pytest.raises(UsageError, match="MaxPool"):
        train(
            tmp_path / "run",
            stand_in_dir,
            model=f"{__name__}:pooled",
            num_gpus=towers,
            xla=True,
            deterministic=True,
        )
