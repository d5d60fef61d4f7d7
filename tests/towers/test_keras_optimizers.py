"""Optimizers of Keras by name: which there are, their arguments, their weight decay."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import flags, optimizer_flag
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.towers import keras_optimizers, optimizers
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

RATE = 0.01


def test_every_optimizer_of_keras_is_either_taken_or_refused():
    there = {
        name.lower()
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer)
    }
    assert there == {*optimizer_flag.NAMES, *optimizer_flag.REFUSED}
    assert not {*optimizer_flag.NAMES} & {*optimizer_flag.REFUSED}


def test_momentum_is_a_flag_of_those_that_have_one():
    having = {
        name
        for name in optimizer_flag.KERAS
        if "momentum" in inspect.signature(keras_optimizers.find(name)).parameters
    }
    assert having == {*optimizer_flag.WITH_MOMENTUM} - {"sgd", "muon"}
    assert optimizers.build("rmsprop", RATE, 0.7).momentum == 0.7


def build(name, devices=("/cpu:0",), arguments=None, **options):
    """Towers of a small model in float64, at a constant rate."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(4, 3, dtype="float64"),
        keras.layers.Flatten(dtype="float64"),
        keras.layers.Dense(3, dtype="float64"),
    ]
    model = keras.Sequential([keras.Input((6, 6, 3), dtype="float64"), *layers])
    optimizer = optimizers.build(
        name, RATE, 0.0, arguments, variables=model.trainable_variables, **options
    )
    return TowerBuilder(
        TrainState(model, optimizer),
        devices,
        tower=Tower(models.inference, models.loss),
        update=Update(
            lambda examples_seen: tf.constant(RATE, tf.float64), None, halts=False
        ),
    )


def batches(seed, towers=1, first=0.0):
    random = np.random.default_rng(seed)
    images = random.normal(size=(8, 6, 6, 3))
    images[0, 0, 0, 0] += first
    labels = random.integers(0, 3, 8).astype(np.int32)
    return [*zip(np.split(images, towers), np.split(labels, towers), strict=True)]


def values(builder):
    """What a step writes, but for `global_step`."""
    return [variable.numpy() for variable in builder.state.variables()[:-1]]


@pytest.mark.parametrize("name", optimizer_flag.KERAS)
def test_two_towers_are_one_and_an_update_that_is_not_finite_is_none(name, four_cpus):
    one, two = build(name), build(name, four_cpus[:2])
    start = values(one)
    for seed in range(3):
        one.step(batches(seed))
        two.step(batches(seed, towers=2))
        if seed == 1:
            two.step(batches(9, towers=2, first=np.nan))
    assert int(two.state.global_step) == 4
    for mine, other in zip(values(two), values(one), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12)
    assert np.abs(values(one)[0] - start[0]).max() > 1e-6


def test_float16_scales_the_loss_of_any():
    builder = build("lion", scale_loss=True)
    assert isinstance(builder.state.optimizer, keras.optimizers.LossScaleOptimizer)
    before = values(builder)
    builder.step(batches(0))
    moved = values(builder)[0] - before[0]
    assert np.abs(moved).max() == pytest.approx(RATE, rel=1e-6)  # Signs times the rate.


def test_weight_decay_takes_a_part_off_filters_and_matrices_alone():
    """The same as Adam, but for the rate times 0.5 of the values before the update."""
    builders = [build("adam"), build("adamw", arguments={"weight_decay": 0.5})]
    starts = []
    for builder in builders:
        for variable in builder.state.model.trainable_variables:
            variable.assign_add(tf.ones_like(variable.value))  # Biases begin at zero.
        starts = [one.numpy() for one in builder.state.model.trainable_variables]
        builder.step(batches(0))
    plain, decayed = (
        [one.numpy() for one in builder.state.model.trainable_variables]
        for builder in builders
    )
    for start, without, with_decay in zip(starts, plain, decayed, strict=True):
        part = RATE * 0.5 * start if start.ndim > 1 else 0.0
        np.testing.assert_allclose(with_decay, without - part, rtol=1e-6)


def test_sgd_takes_arguments_of_keras_and_stays_ours():
    optimizer = optimizers.build("sgd", 1, 1, {"nesterov": True})
    assert type(optimizer) is optimizers.SGD
    assert (optimizer.nesterov, optimizer.momentum) == (True, 1.0)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "adamw",
            {"beta_3": 0.9},
            "AdamW has no such argument. It has weight_decay, ",
        ),
        ("adamw", {"kwargs": 0.9}, "AdamW has no such argument"),
        ("adamw", {"name": 1.0}, "AdamW has no such argument"),
        ("adamw", {"amsgrad": 1}, "amsgrad = 1: it is true or false"),
        ("adamw", {"beta_1": True}, "beta_1 = True: it is a number"),
        ("adamw", {"clipnorm": 1.0, "clipvalue": 1.0}, "AdamW refuses them.\nOnly one"),
    ],
)
def test_arguments_that_keras_has_not_are_refused(name, arguments, said):
    with pytest.raises(UsageError) as caught:
        optimizers.build(name, RATE, 0.0, arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"optimizer": "adan"}, "Did you mean adam? It is one of sgd, muon, adadelta,"),
        ({"optimizer": "Ftrl"}, "--optimizer ftrl: it computes every variable anew"),
        ({"optimizer": "LossScaleOptimizer"}, "--precision float16 puts it around"),
        (
            {"optimizer": "adamw", "momentum": 0.9},
            "--momentum 0.9: adamw has no momentum",
        ),
        ({"optimizer_arguments": {"learning_rate": 1.0}}, "--learning_rate decides it"),
        ({"optimizer_arguments": {"global_clipnorm": 1.0}}, "--clip_norm decides it"),
        (
            {"optimizer_arguments": {"nesterov": "yes"}},
            "nesterov = 'yes': it has to be",
        ),
        ({"optimizer_arguments": {"rho": float("nan")}}, "rho = nan: it has to be"),
        (
            {"schedule": "one_cycle", "warmup_epochs": 1.0},
            "--schedule one_cycle begins",
        ),
        (
            {"optimizer": "muon", "optimizer_arguments": {"ns_steps": 3}},
            "muon has no arguments but --momentum",
        ),
    ],
)
def test_what_cannot_work_is_a_sentence_before_tensorflow_starts(values, said):
    with pytest.raises(UsageError) as caught:
        Config(**values)
    assert said in str(caught.value)


def test_a_recipe_holds_the_arguments_as_a_table(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'optimizer = "Lion"\nschedule = "cosine"\n'
        "[optimizer_arguments]\nweight_decay = 1\n"
    )
    config = flags.with_recipe({"recipe": str(recipe), "learning_rate": 1e-4})
    assert (config.optimizer, config.schedule) == ("lion", "cosine")
    assert config.optimizer_arguments == {"weight_decay": 1}
    recipe.write_text("optimizer_arguments = 0.9")
    with pytest.raises(UsageError, match=r"optimizer_arguments = 0\.9 is not of type"):
        flags.with_recipe({"recipe": str(recipe)})
