"""Flags that change how fast a training runs, and not where it ends."""

import shutil

import keras
import pytest

import runs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.towers.rounding import relative_difference
from cifar10.training import assembly, train as training


def train(train_dir, data_dir, **options):
    """Trains 6 steps on the stand-in; returns the last checkpoint's variables."""
    defaults = {
        "num_gpus": 1,
        "batch_size": 8,
        "max_steps": 6,
        "checkpoint_steps": 4,
        "log_frequency": 2,
        "summary_steps": 100,
    }
    return runs.train(train_dir, data_dir, **{**defaults, **options})


def losses(train_dir):
    """Returns the lines of the log without what differs between equal runs."""
    times = {"examples_per_sec", "time", "seconds"}
    lines = runs.logged(train_dir)
    return [{name: line[name] for name in line.keys() - times} for line in lines]


def test_a_run_in_multi_step_calls_logs_and_resumes_like_single_steps(
    tmp_path, stand_in_dir
):
    straight = train(tmp_path / "straight", stand_in_dir)
    train(tmp_path / "resumed", stand_in_dir, max_steps=5, steps_per_call=3)
    resumed = train(tmp_path / "resumed", stand_in_dir)
    runs.assert_equal(resumed, straight)
    # The losses' averages go on.
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")


def test_a_resumed_run_does_not_keep_a_default_number_of_steps_per_call(
    tmp_path, stand_in_dir, monkeypatch
):
    def count(config, *_):
        found.append(config.speed.steps_per_call)
        return 2

    found = []
    monkeypatch.setattr(assembly, "default_steps_per_call", count)
    train(tmp_path / "run", stand_in_dir, max_steps=2)
    training.train(Config(resume=tmp_path / "run", max_steps=3))
    assert found == [None, None]


@pytest.mark.slow
def test_a_compiled_run_resumes_bit_for_bit_after_any_step(tmp_path, stand_in_dir):
    """With batch statistics and dropout; where a run stopped divides its calls."""
    options = {"model": "small_runs:small", "momentum": 0.9, "precision": "float32"}
    options |= {"xla": True, "steps_per_call": 4, "checkpoint_steps": 9}
    straight = train(tmp_path / "straight", stand_in_dir, max_steps=9, **options)
    for end in (1, 6, 9):
        resumed = train(tmp_path / "resumed", stand_in_dir, max_steps=end, **options)
    runs.assert_equal(resumed, straight)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")


def of_any_size(image_shape, classes):
    model = keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(4, 2, activation="gelu", name="still"),
            keras.layers.Conv2D(6, 3, strides=2, use_bias=False, name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(8, 3, activation="gelu"),
            keras.layers.GlobalMaxPooling2D(),
            # As in airbench94: Muon's rates are made for it.
            keras.layers.Rescaling(1 / 256),
            keras.layers.Dense(classes, use_bias=False),
        ]
    )
    model.get_layer("still").kernel.trainable = False
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "tutorial", "batch_size": 16},
        {"recipe": "tutorial", "batch_size": 8, "num_gpus": 2, "accumulate": 2},
        # With Muon, stages of three image sizes, and variables that stand still.
        {
            "recipe": "fast",
            "model": f"{__name__}:of_any_size",
            "stages": [
                {"until": 0.3, "image_size": 24},
                {"until": 0.7, "image_size": 28, "frozen": ["still/bias"]},
                {"frozen": ["still/bias", "first"]},
            ],
            "batch_size": 32,
            "max_steps": 7,
            "checkpoint_steps": 6,
        },
    ],
)
def test_a_separately_compiled_update_trains_and_resumes_alike(
    tmp_path, stand_in_dir, options
):
    model = Config(recipe=options["recipe"]).network.model
    options = {"precision": "float64", "max_steps": 8, "model": model, **options}
    plain = train(tmp_path / "plain", stand_in_dir, **options)
    options["xla_update"] = True
    straight = train(tmp_path / "straight", stand_in_dir, **options)
    for name, value in plain.items():
        assert relative_difference(value, straight[name]) < 1e-8, name
    shutil.rmtree(runs.checkpoint(tmp_path / "straight", options["max_steps"]))
    resumed = train(tmp_path / "straight", stand_in_dir, **options)
    runs.assert_equal(resumed, straight)


@pytest.mark.slow
def test_float16_resumes_with_its_loss_scale(tmp_path, stand_in_dir):
    straight = train(tmp_path / "straight", stand_in_dir, precision="float16")
    assert runs.logged(tmp_path / "straight")[-1]["loss_scale"] > 1
    train(tmp_path / "resumed", stand_in_dir, precision="float16", max_steps=4)
    resumed = train(tmp_path / "resumed", stand_in_dir, precision="float16")
    assert any("scale" in name for name in straight)
    runs.assert_equal(resumed, straight)


def pooled(image_shape, classes):
    layers = [keras.layers.Conv2D(2, 3), keras.layers.MaxPooling2D(3, 2)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


@pytest.mark.slow
def test_layers_unsuitable_for_xla_are_named(tmp_path, stand_in_dir):
    with pytest.raises(UsageError, match="MaxPool"):
        train(
            tmp_path / "run",
            stand_in_dir,
            model=f"{__name__}:pooled",
            num_gpus=2,
            xla=True,
            deterministic=True,
        )
