"""The check that the frameworks' networks are the same, and that it notices if not."""

import dataclasses
import functools
import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.parity import complaint
from benchmarks.rosetta import data, parity, weights
from benchmarks.rosetta.task import TASKS, initial_values, untied_batches

# Half of the check is about dropout; without any it is done sooner.
STILL = dataclasses.replace(TASKS["cnn"], dropout=(0.0, 0.0, 0.0))
PACKAGES = {"pytorch": "torch", "jax": "flax"}


def module_of(framework, network="cnn"):
    pytest.importorskip(PACKAGES.get(framework, "keras"))
    return importlib.import_module(f"benchmarks.rosetta.{network}_{framework}")


@functools.cache
def given(network):
    """Returns initial values and batches of a network."""
    values, noise = initial_values(network), data.noise_batches(network)
    return values, noise[0], noise if network == "gru" else untied_batches()


@functools.cache
def reference(task):
    """Returns what the reference shows of a task; dropout takes it seconds."""
    module = module_of("tensorflow", task.network)
    return parity.collect(module.Model, task, *given(task.network))


def fault(framework, task=TASKS["cnn"], values=None):
    """Returns what the check has to say of a framework's model."""
    keras.utils.set_random_seed(0)
    first, *others = given(task.network)
    module = module_of(framework, task.network)
    found = parity.collect(module.Model, task, values or first, *others)
    return complaint(parity.compare(reference(task), found, task))


def with_one_changed(value, place):
    changed = value.copy()
    changed[place] += 0.01
    return changed


def peers(*names):
    return [pytest.param(name, marks=pytest.mark.peers) for name in names]


@pytest.mark.slow
def test_sound_framework_has_no_fault():
    assert fault("towers") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework", ["towers", "tensorflow", *peers("keras", "pytorch", "jax")]
)
def test_changed_initial_value_is_noticed(framework):
    values, name = given("cnn")[0], "conv2/bias"
    values = {**values, name: with_one_changed(values[name], 7)}
    assert "differ" in fault(framework, STILL, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "optimizer"),
    [
        ("towers", "keras.optimizers.SGD"),
        pytest.param("pytorch", "torch.optim.SGD", marks=pytest.mark.peers),
        pytest.param("jax", "optax.sgd", marks=pytest.mark.peers),
    ],
)
def test_another_form_of_momentum_is_noticed(framework, optimizer, monkeypatch):
    module_of(framework)
    module, _, name = optimizer.rpartition(".")
    right = getattr(importlib.import_module(module), name)

    def nesterov(*arguments, **others):  # The last argument is the momentum.
        return right(*arguments, nesterov=arguments[-1] > 0, **others)

    monkeypatch.setattr(optimizer, nesterov)
    assert "momentum" in fault(framework, STILL)


def moved(optimizer, gradient):
    """Returns what one update makes of zeros."""
    variable = keras.Variable(np.zeros((4, 2), np.float32))
    optimizer.build([variable])
    optimizer.apply([gradient], [variable])
    return variable.numpy()


def test_a_repeated_word_moves_by_its_summed_gradient():
    adam = module_of("keras", "gru").Adam
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, -1.0], [2.0, 2.0]]), [1, 3, 1], [4, 2]
    )
    whole = moved(adam(0.1), tf.convert_to_tensor(slices))
    np.testing.assert_allclose(moved(adam(0.1), slices), whole, rtol=1e-6)
    # Keras's own would not need ours otherwise.
    assert np.abs(moved(keras.optimizers.Adam(0.1), slices) - whole).max() > 0.01


@pytest.mark.parametrize("network", TASKS)
def test_values_survive_a_round_trip_through_pytorchs_layout(network):
    values = {
        name: np.arange(value.size, dtype=np.float32).reshape(value.shape)
        for name, value in initial_values(network).items()
    }
    back = weights.from_pytorch(weights.to_pytorch(values))
    assert back.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)


def test_a_value_other_than_a_number_is_refused():
    sound = {"a": np.ones(2)}
    broken = {"a": np.array([1.0, np.nan])}
    task = TASKS["cnn"]
    right = parity.Evidence(0, 0, 1.0, np.ones(2), sound, sound, 0.2, [0.1])
    for change in (
        {"loss": np.nan},
        {"logits": np.full(2, np.nan)},
        {"gradients": broken},
        {"updates": broken},
        {"rise": np.nan},
        {"spreads": [np.nan]},
        {"strays": 1},
        {"gradients": {"a": np.ones(3)}},
    ):
        wrong = dataclasses.replace(right, **change)
        assert complaint(parity.compare(right, wrong, task)), change
    assert complaint(parity.compare(right, right, task)) == ""
