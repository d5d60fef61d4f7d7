"""A run recognizes its model by what the model computes."""

import json
import sys

import keras
import pytest
import tensorflow as tf
from keras import layers

import runs
from cifar10 import evaluate
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.model import probe
from cifar10.training.replay import Replay
from recorded_runs import recorded

SHAPE = (24, 24, 3)


def network(activation="relu", pool=layers.MaxPooling2D, **options):
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            layers.Conv2D(8, 3, **options),
            layers.BatchNormalization(),
            layers.Activation(activation),
            pool(2),
            layers.Dropout(0.5),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )


class Infinite(layers.Layer):
    def call(self, inputs):
        return inputs / 0.0


class Drawing(layers.Layer):
    """Draws in evaluations, too."""

    def __init__(self, seed):
        super().__init__()
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, inputs):
        return inputs + keras.random.normal((4,), seed=self.generator)


class Noisy(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


def alike(first, second, precision="float32"):
    entries = Config().values | {"precision": precision}
    try:
        recorded(**entries, model_logits=first).check_logits(second)
    except UsageError:
        return False
    return True


@pytest.fixture
def policy():
    """Sets Keras's policy; resets it after the test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "float16"])
def test_models_with_equal_variables_are_told_apart(policy, precision):
    policy(f"mixed_{precision}" if "16" in precision else precision)
    found = probe(network(), SHAPE)
    assert found
    assert alike(found, probe(network(), SHAPE), precision)
    for other in (
        network("tanh"),
        network("relu6"),
        network(pool=layers.AveragePooling2D),
        network(strides=2),
        network(padding="same"),
    ):
        assert not alike(found, probe(other, SHAPE), precision)


def test_a_model_is_recognized_in_another_precision_of_16_bits(policy):
    policy("mixed_float16")
    found = probe(network(), SHAPE)
    policy("mixed_bfloat16")
    assert alike(found, probe(network(), SHAPE), "bfloat16")


def test_variables_keep_their_values_and_their_values_do_not_count():
    model = network()
    found = probe(model, SHAPE)
    for variable in model.variables:
        variable.assign(variable + 1)
    values = {variable.path: variable.numpy() for variable in model.variables}
    assert probe(model, SHAPE) == found
    runs.assert_equal({one.path: one.numpy() for one in model.variables}, values)


def test_a_random_layer_is_recognized_whatever_its_seed():
    found = []
    for seed in (0, 1):
        model = network()
        model.add(Drawing(seed))
        found.append(probe(model, SHAPE))
    assert found[0] == found[1] != []


@pytest.mark.parametrize("layer", [Noisy, Infinite])
def test_a_model_whose_logits_tell_nothing_is_not_recognized(layer):
    tf.random.set_seed(0)  # Another test may have asked for deterministic operations.
    model = network()
    model.add(layer())
    assert probe(model, SHAPE) == []
    assert alike([], probe(network(), SHAPE))
    assert alike(probe(network(), SHAPE), [])


ACTIVATION = ["relu"]


def changing(image_shape, classes):
    """A model whose code the test changes."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(4, 5, strides=4, activation=ACTIVATION[0]),
            layers.Flatten(),
            layers.Dense(classes),
        ]
    )


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != ".lock"}


def test_a_run_is_not_continued_scored_or_replayed_with_changed_code(
    tmp_path, stand_in_dir, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    run, name = tmp_path / "run", f"{__name__}:changing"
    how = {"model": name, "batch_size": 8, "checkpoint_steps": 2, "num_gpus": 1}
    runs.train(run, stand_in_dir, **how, max_steps=2)
    monkeypatch.setitem(globals(), "ACTIVATION", ["tanh"])
    before = content(run)
    for use in (
        lambda: runs.train(run, stand_in_dir, **how, max_steps=4),
        lambda: evaluate(run),
        lambda: Replay(run),
    ):
        with pytest.raises(UsageError, match="computes other logits"):
            use()
    follower = Follower(run)
    assert not follower.look()
    assert "computes other logits" in follower.why_no_weights
    assert content(run) == before
    monkeypatch.setitem(globals(), "ACTIVATION", ["relu"])
    runs.train(run, stand_in_dir, **how, max_steps=4)
    assert evaluate(run)["step"] == 4
    # Runs of earlier versions recorded no logits, and those of our models do not.
    settings = json.loads((run / "config.json").read_text())
    assert len(settings.pop("model_logits")) == 8
    assert not RecordedRun.of(run, settings).facts.model_logits
    plain = tmp_path / "plain"
    runs.train(plain, stand_in_dir, **how | {"model": "tutorial"}, max_steps=1)
    assert json.loads((plain / "config.json").read_text())["model_logits"] == []
