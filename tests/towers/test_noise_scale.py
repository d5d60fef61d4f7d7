"""The gradient noise scale, compared with what single images' gradients give."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.distributed.programs import ProgramBuilder
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.run_directory import checkpoints
from cifar10.towers import noise_scale
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update
from cifar10.training import train as training

IMAGES, FEATURES, CLASSES, BATCH = 48, 6, 3, 4
RANDOM = np.random.default_rng(5)
INPUTS = RANDOM.normal(size=(IMAGES, FEATURES)).astype(np.float32)
LABELS = (INPUTS[:, 0] > 0).astype(np.int32) + (INPUTS[:, 1] > 1)
AT_FIXED_WEIGHTS = Update(lambda seen: tf.constant(0.0, tf.float64), None)
FROZEN = "first"


def state_on(device="/cpu:0", scale=None):
    keras.utils.set_random_seed(3)
    given = {"kernel_regularizer": keras.regularizers.L2(0.1), "dtype": "float32"}
    with tf.device(device):
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(5, "tanh", name=FROZEN, **given),
                keras.layers.Dense(CLASSES, name="last", **given),
            ]
        )
        optimizer = keras.optimizers.SGD(0.0)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, scale)
        return TrainState(model, optimizer, device)


def builder_of(kind, cpus):
    """Returns towers of a kind, and how many there are."""
    parts = {
        "tower": Tower(models.inference, models.loss, xla=kind == "compiled"),
        "update": AT_FIXED_WEIGHTS,
    }
    if kind in ("programs", "strategy"):
        states = [state_on(cpu) for cpu in cpus[:2]]
        if kind == "programs":
            return ProgramBuilder(states, cpus[:2], **parts)
        where = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(cpus[:2], where)
        return ReplicaBuilder(strategy, states, cpus[:2], **parts)
    devices = {"shared": cpus[:1] * 2 + cpus[1:2] * 2, "compiled": cpus[:1] * 3}
    state = state_on(scale=2.0**12 if kind == "scaled" else None)
    builder = TowerBuilder(state, devices.get(kind, cpus[:4]), **parts)
    if kind == "frozen":
        builder.freeze([FROZEN])
    return builder


def by_single_images(model, frozen):
    """Returns |G|^2 and S, from the gradient of each image alone."""
    variables = [v.value for v in model.trainable_variables if frozen not in v.path]
    rows = []
    for image, label in zip(INPUTS, LABELS, strict=True):
        with tf.GradientTape() as tape:
            logits = model(image[None])
            loss = models.loss(logits, tf.constant(label[None]), model.losses)
        gradients = tape.gradient(loss["total_loss"], variables)
        rows.append(np.concatenate([np.ravel(one) for one in gradients]))
    mean = np.mean(rows, axis=0)
    return mean @ mean, np.mean(np.sum((rows - mean) ** 2, axis=1))


SLOW = [
    pytest.param(kind, marks=pytest.mark.slow)
    for kind in ("shared", "compiled", "programs", "strategy")
]


@pytest.mark.parametrize("kind", ["towers", "scaled", "frozen", *SLOW])
def test_the_noise_scale_agrees_with_the_gradients_of_single_images(
    four_cpus, monkeypatch, kind
):
    monkeypatch.setattr(noise_scale, "_PERIOD", 1)
    builder = builder_of(kind, four_cpus)
    towers, random = len(builder.devices), np.random.default_rng(0)
    images, averages = BATCH * towers, {}
    for _ in range(2000):
        chosen = random.integers(0, IMAGES, (towers, BATCH))
        batches = [tuple(map(tf.constant, (INPUTS[n], LABELS[n]))) for n in chosen]
        metrics = builder.step(batches).metrics
        square, norm = (
            float(metrics[name]) for name in (noise_scale.SQUARE, "gradient_norm")
        )
        noise_scale.observe(averages, square, norm, towers)
    frozen = FROZEN if kind == "frozen" else "none"
    signal, noise = by_single_images(builder.state.model, frozen)
    noise /= images
    found = averages["mean"] - averages["noise"]
    error = math.hypot(averages["mean: error"], averages["noise: error"])
    assert 3 * error < signal / 3, "the test can fail"
    assert averages["noise: error"] < noise / 20
    assert found == pytest.approx(signal, abs=3 * error)
    assert averages["noise"] == pytest.approx(noise, abs=3 * averages["noise: error"])
    assert noise_scale.estimate(averages) == (averages["noise"] / found, False)


def test_the_norm_of_a_tower_is_computed_in_every_second_step(four_cpus):
    """A single batch a step tells nothing, so nothing is computed."""
    batch = tf.constant(INPUTS[:BATCH]), tf.constant(LABELS[:BATCH])
    parts = Tower(models.inference, models.loss), AT_FIXED_WEIGHTS
    given = dict(zip(("tower", "update"), parts, strict=True))
    two = TowerBuilder(state_on(), four_cpus[:2], **given)
    found = [two.step([batch] * 2).metrics[noise_scale.SQUARE] for _ in range(6)]
    assert np.isfinite(found).nonzero()[0].tolist() == [1, 3, 5]
    one = TowerBuilder(state_on(), four_cpus[:1], **given)
    assert noise_scale.SQUARE not in one.step([batch]).metrics


def averages_of(signal, noise, *, images=128, steps=400, spread=0.5):
    """Averages of steps whose mean gradient varies by a share of its noise."""
    averages, random = {}, np.random.default_rng(0)
    for step in range(steps):
        mean = signal + noise / images * random.normal(1.0, spread)
        square = mean + noise * (4 - 1) / images
        if step % 10:
            square = math.nan
        noise_scale.observe(averages, square, math.sqrt(max(mean, 0)), 4)
    return averages


def test_the_text_states_the_savings_of_twice_the_batch():
    """By steps ~ 1 + scale / batch: 1,280 images at 128 save 10/22, at 2,560 1/6."""
    averages = averages_of(1.0, 1280.0, spread=0.0)
    assert noise_scale.estimate(averages)[0] == pytest.approx(10)
    said = noise_scale.in_words(averages, 128)
    assert "about 1,300 images" in said
    assert "about 45 %" in said
    averages = averages_of(1.0, 1280.0, images=2560, spread=0.0)
    assert "about 17 %" in noise_scale.in_words(averages, 2560)


def test_an_unknown_scale_is_not_stated():
    assert not noise_scale.in_words({}, 128)
    assert not noise_scale.in_words(averages_of(1.0, 1280.0, steps=99), 128)
    assert not noise_scale.in_words(averages_of(1.0, -5.0, spread=0.0), 128)
    # A gradient that drowns in noise bounds the scale from below alone.
    averages = averages_of(0.001, 1280.0)
    scale, is_bound = noise_scale.estimate(averages)
    assert is_bound
    assert 1 < scale < 10 / 0.001
    assert "at least" in noise_scale.in_words(averages, 128)


def test_an_overflow_in_float16_does_not_count():
    averages = averages_of(1.0, 1280.0)
    before = dict(averages)
    noise_scale.observe(averages, math.inf, 0.0, 4)
    assert averages == before


STRANGERS = [
    {"mean: count": 200.0, "noise": 1.0},
    {"noise": 1e300, "noise: count": 5.0},
    {"mean": -1e308, "mean: square": 1e308, "mean: count": 1e308},
    {"mean: count": -4.0, "noise: count": -1.0},
    {f"{one}{key}": 1e308 for one in ("mean", "noise") for key in ("", ": error")},
]


@pytest.mark.parametrize("averages", STRANGERS)
def test_averages_of_a_stranger_raise_nothing(averages):
    noise_scale.in_words(averages, 128)
    observed = {**averages}
    for _ in range(3):
        noise_scale.observe(observed, 1.5, 1.0, 4)
        noise_scale.in_words(observed, 128)


def test_steps_of_a_single_batch_discard_the_estimate():
    averages = averages_of(1.0, 1280.0)
    noise_scale.observe(averages, None, 1.0, 1)
    assert not noise_scale.in_words(averages, 128)


# ---- Trainings


def train(train_dir, data_dir, **options):
    """Trains a small model; returns the moving averages of its last checkpoint."""
    keras.backend.clear_session(free_memory=False)
    given = {
        "batch_size": 8,
        "accumulate": 2,
        "log_frequency": 5,
        "learning_rate": 1e-5,
        "precision": "float32",
    }
    places = {"data": "synthetic", "data_dir": str(data_dir)}
    config = Config(
        train_dir=str(train_dir),
        model=runs.SMALL,
        deterministic=True,
        **(given | places | options),
    )
    step = training.train(config)
    return checkpoints.read_manifest(train_dir / "checkpoints", step)["gradient_noise"]


def logged(train_dir):
    return {one["step"]: one.get(noise_scale.NAME) for one in runs.logged(train_dir)}


def test_a_run_logs_the_noise_scale_and_continues_it_after_a_resume(
    tmp_path, stand_in_dir, capsys
):
    whole = train(tmp_path / "whole", stand_in_dir, max_steps=140)
    assert "Gradient noise scale:" in capsys.readouterr().out
    train(tmp_path / "run", stand_in_dir, max_steps=104)
    assert train(tmp_path / "run", stand_in_dir, max_steps=140) == whole
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    found = logged(tmp_path / "whole")
    assert not any(found[step] for step in range(5, 100, 5)), "too few steps"
    assert found[140] == pytest.approx(16 * noise_scale.estimate(whole)[0])
    # A single batch a step tells nothing.
    capsys.readouterr()
    one = {"accumulate": 1, "batch_size": 16}
    assert train(tmp_path / "run", stand_in_dir, max_steps=145, **one) == {}
    assert logged(tmp_path / "run")[145] is None
    assert "Gradient noise scale" not in capsys.readouterr().out


def test_a_stage_with_other_trained_layers_restarts_the_estimate(
    tmp_path, stand_in_dir
):
    stages = [{"until": 0.5, "frozen": ["conv1"]}, {}]
    given = {"max_steps": 24, "schedule": "linear", "stages": stages}
    assert train(tmp_path, stand_in_dir, **given)["mean: count"] == 12
