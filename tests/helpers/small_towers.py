"""Helpers: towers of models that are computed by hand."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.input.pictures.arrays import array_dataset
from cifar10.model import inference, loss
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update
from cifar10.training import assembly

ONE_TOWER = Placement(("/cpu:0",), simulated=True, description="one tower")


def resolved(**options):
    """Returns the configuration of a run with one tower."""
    return assembly.resolve_config(
        Config(**{"precision": "float32", **options}), ONE_TOWER
    )


def open_batches(config, placement, workers, images, labels, batch, step):
    """Opens the input of a run that has no parts but these, and ten classes."""
    parts = {one.name: None for one in dataclasses.fields(assembly.Training)}
    parts |= {"config": config, "placement": placement, "workers": workers}
    parts |= {"images": images, "labels": labels}
    black = np.zeros((10, 8, 8, 3), np.uint8)
    parts["dataset"] = array_dataset(
        {"x_test": black, "y_test": np.arange(10)}, "", "", None
    )
    return assembly.Training(**parts).open_batches(batch, step)


def make_towers(
    model,
    devices,
    *,
    optimizer=None,
    device="/cpu:0",
    loss=loss,
    **of_update,
):
    """Returns towers with constant rates; further options are the update's."""
    rates = {
        "learning_rate": lambda examples_seen: tf.constant(0.1, tf.float64),
        "average_decay": lambda step: tf.constant(0.75, tf.float64),
    }
    return TowerBuilder(
        TrainState(model, optimizer or keras.optimizers.SGD(0.1), device),
        devices,
        tower=Tower(inference, loss),
        update=Update(**{**rates, **of_update}),
    )


def split(inputs, labels, count):
    """Divides a batch among some towers."""
    return list(zip(tf.split(inputs, count), tf.split(labels, count), strict=True))


def values(builder):
    """Returns what steps write, the number of steps last."""
    return [variable.numpy() for variable in builder.state.variables()]


def assert_equal(found, expected):
    """Compares lists of arrays bit for bit."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def line_model():
    """y = w x + b, from w = 2 and b = 1."""
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(
        1,
        kernel_initializer=keras.initializers.Constant(2.0),
        bias_initializer=keras.initializers.Constant(1.0),
    )
    return keras.Model(inputs, dense(inputs))


def squared_error(outputs, labels, penalties):
    del penalties
    return {"total_loss": tf.reduce_mean(tf.square(outputs[:, 0] - labels))}


def small_model(*extra_layers, dtype="float32"):
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(units, dtype=dtype) for units in (8, 3)]
    inputs = keras.Input((6,), dtype=dtype)
    return keras.Sequential([inputs, dense[0], *extra_layers, dense[1]])


def random_batch(count=24, seed=0, dtype=tf.float32):
    random = np.random.default_rng(seed)
    inputs = tf.constant(random.normal(size=(count, 6)), dtype)
    return inputs, tf.constant(random.integers(0, 3, count), tf.int32)
