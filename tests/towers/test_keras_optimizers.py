"""Optimizers of Keras by name: which there are, their arguments, their weight decay."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.towers import optimizers
from cifar10.towers.optimizers import build_optimizer, slow_down
from small_towers import assert_equal, make_towers, random_batch, small_model, values

RATE = 0.01


def test_only_optimizers_with_momentum_take_the_momentum_flag():
    having = {
        kind.__name__.lower()
        for kind in vars(keras.optimizers).values()
        if isinstance(kind, type) and "momentum" in inspect.signature(kind).parameters
    }
    assert having & {*optimizers.KERAS_NAMES} == {*optimizers.WITH_MOMENTUM} - {
        "sgd",
        *optimizers.OWN,
    }
    assert build_optimizer("rmsprop", RATE, 0.7).momentum == 0.7
    optimizer = build_optimizer("sgd", 1, 1, {"nesterov": True})
    assert type(optimizer) is keras.optimizers.SGD
    assert (optimizer.nesterov, optimizer.momentum) == (True, 1.0)


def build(name, arguments=None, **options):
    """A tower of a small model in float64, at a constant rate."""
    model = small_model(dtype="float64")
    variables = model.trainable_variables
    optimizer = build_optimizer(
        name, RATE, 0.0, arguments, variables=variables, **options
    )
    rate = tf.constant(RATE, tf.float64)
    return make_towers(
        model,
        ["/cpu:0"],
        optimizer=optimizer,
        learning_rate=lambda examples_seen: rate,
        average_decay=None,
        halts=False,
    )


def batch(count=8):
    return random_batch(count, dtype=tf.float64)


def moved(builder):
    """Steps once; returns by how much the trained variables have changed."""
    variables = builder.state.model.trainable_variables
    before = [variable.numpy() for variable in variables]
    builder.step([batch()])
    return [v.numpy() - old for v, old in zip(variables, before, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "adamw" else pytest.mark.slow)
        for name in optimizers.NAMES
    ],
)
def test_a_nonfinite_update_changes_nothing(name):
    builder = build(name)
    assert np.abs(moved(builder)[0]).max() > 1e-6
    *before, _ = values(builder)
    optimizer = builder.state.optimizer
    slots = [variable.numpy() for variable in optimizer.variables]
    images, labels = batch()
    builder.step([(images * np.nan, labels)])
    *after, step = values(builder)
    assert step == 2
    assert_equal(after, before)
    assert_equal([variable.numpy() for variable in optimizer.variables], slots)


def test_float16_scales_the_loss_without_changing_the_rate_of_lion():
    """Also where `--pretrained_rate` makes some variables slow."""
    builder = build("lion", scale_loss=True, scale_updates=True)
    state = builder.state
    assert isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer)
    slow_down(state.optimizer, state.model.trainable_variables[:1], 0.25)
    slow, *others = (np.abs(change).max() for change in moved(builder))
    assert slow == pytest.approx(RATE / 4, rel=1e-6)
    assert others == pytest.approx([RATE] * 3, rel=1e-6)


def test_a_matrix_named_as_a_bias_or_scale_does_not_decay():
    names = ["kernel", "upscale", "bias", "layer_scale", "gamma", "beta"]
    variables = [keras.Variable(tf.ones([2, 2]), name=name) for name in names]
    optimizer = build_optimizer(
        "adamw", RATE, 0.0, {"weight_decay": 0.5}, variables=variables
    )
    optimizer.apply([tf.zeros([2, 2])] * len(variables), variables)
    assert [one.name for one in variables if one.numpy().max() < 1.0] == names[:2]


def test_weight_decay_shrinks_only_filters_and_matrices():
    """The same as Adam, but for the rate times 0.5 of the values before the update."""
    changes, starts = [], []
    for name, arguments in (("adam", None), ("adamw", {"weight_decay": 0.5})):
        builder = build(name, arguments)
        variables = builder.state.model.trainable_variables
        for variable in variables:
            variable.assign_add(tf.ones_like(variable.value))  # Biases begin at zero.
        starts = [variable.numpy() for variable in variables]
        changes.append(moved(builder))
    for start, plain, decayed in zip(starts, *changes, strict=True):
        part = RATE * 0.5 * start if start.ndim > 1 else 0.0
        np.testing.assert_allclose(decayed, plain - part, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"beta_3": 0.9}, "beta_3"),
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "AdamW"),
    ],
)
def test_arguments_unknown_to_keras_are_refused(arguments, named):
    with pytest.raises(UsageError, match=named):
        build_optimizer("adamw", RATE, 0.0, arguments)


def test_muon_takes_no_other_arguments():
    with pytest.raises(UsageError, match="ns_steps"):
        build_optimizer("muon", RATE, 0.6, {"ns_steps": 3})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"optimizer": "ftrl"}, "ftrl"),
        ({"optimizer": "adamw", "momentum": 0.9}, "--momentum"),
        ({"optimizer_arguments": {"learning_rate": 1.0}}, "--learning_rate"),
        ({"optimizer_arguments": {"rho": float("nan")}}, "rho"),
    ],
)
def test_contradictions_are_refused_before_tensorflow_starts(values, named):
    with pytest.raises(UsageError, match=named):
        Config(**values)
