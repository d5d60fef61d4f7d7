"""The check that the frameworks' networks are the same, and that it notices if not."""

import dataclasses
import functools
import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.rosetta import data, parity, weights
from benchmarks.rosetta.task import TASKS, initial_values
from cifar10 import model as models


@pytest.fixture(scope="module")
def given():
    """Initial values and batches of the convolutional network."""
    values = initial_values("cnn")
    return values, data.noise_batches("cnn")[0], data.untied_batches(values)


# Half of the check is about dropout; without any it is done sooner.
STILL = dataclasses.replace(TASKS["cnn"], dropout=(0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def reference(given):
    """Returns what the reference shows of a task; dropout takes it seconds."""
    module = importlib.import_module("benchmarks.rosetta.cnn_numpy")
    return functools.cache(lambda task: parity.collect(module.Model, task, *given))


def fault(reference, given, framework, task=TASKS["cnn"]):
    """Returns what the check has to say of a framework's model."""
    needed = {"pytorch": "torch", "jax": "flax"}
    pytest.importorskip(needed.get(framework, "keras"))
    keras.utils.set_random_seed(0)
    module = importlib.import_module(f"benchmarks.rosetta.cnn_{framework}")
    found = parity.collect(module.Model, task, *given)
    return parity.complaint(parity.compare(reference(task), found, task))


@pytest.fixture(scope="module")
def gru_reference():
    """Values and batches of the recurrent network, and what the reference shows."""
    noise = data.noise_batches("gru")
    given = initial_values("gru"), noise[0], noise
    module = importlib.import_module("benchmarks.rosetta.gru_numpy")
    return given, parity.collect(module.Model, TASKS["gru"], *given)


def gru_fault(given, reference, framework):
    module = importlib.import_module(f"benchmarks.rosetta.gru_{framework}")
    found = parity.collect(module.Model, TASKS["gru"], *given)
    return parity.complaint(parity.compare(reference, found, TASKS["gru"]))


@pytest.mark.slow
@pytest.mark.parametrize("task", [TASKS["cnn"], STILL], ids=["dropout", "still"])
def test_a_sound_framework_has_no_fault(reference, given, task):
    assert fault(reference, given, "tensorflow", task) == ""


EACH = pytest.mark.parametrize(
    "framework",
    [
        "towers",
        "tensorflow",
        pytest.param("keras", marks=pytest.mark.peers),
        pytest.param("pytorch", marks=pytest.mark.peers),
        pytest.param("jax", marks=pytest.mark.peers),
    ],
)
OF_THE_PEERS = pytest.mark.parametrize("framework", ["pytorch", "jax"])


@pytest.mark.slow
@EACH
def test_one_changed_initial_value_is_noticed(reference, given, framework):
    values, *others = given
    changed = {**values, "conv2/bias": values["conv2/bias"].copy()}
    changed["conv2/bias"][7] += 0.01
    assert "differ" in fault(reference, (changed, *others), framework, STILL)


def nesterov(function):
    """Returns what makes an optimizer with Nesterov's momentum, if it has any."""

    def changed(*arguments, **others):  # The last one is the momentum.
        return function(*arguments, nesterov=arguments[-1] > 0, **others)

    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework", ["towers", pytest.param("keras", marks=pytest.mark.peers)]
)
def test_another_form_of_momentum_is_noticed(reference, given, framework, monkeypatch):
    right = keras.optimizers.SGD
    monkeypatch.setattr(keras.optimizers, "SGD", nesterov(right))
    assert "two steps change" in fault(reference, given, framework, STILL)


@pytest.mark.peers
@OF_THE_PEERS
def test_another_form_of_a_peers_momentum_is_noticed(
    reference, given, framework, monkeypatch
):
    of_each = {"pytorch": ("torch.optim", "SGD"), "jax": ("optax", "sgd")}
    module, name = of_each[framework]
    pytest.importorskip(module)
    monkeypatch.setattr(
        f"{module}.{name}",
        nesterov(getattr(importlib.import_module(module), name)),
    )
    assert "two steps change" in fault(reference, given, framework, STILL)


@pytest.mark.peers
@OF_THE_PEERS
@pytest.mark.parametrize(
    ("changed", "shown"),
    [("eval", "is dropout on?"), ("train", "dropout adds")],
)
def test_a_peers_wrong_dropout_flag_is_noticed(
    reference, given, framework, changed, shown, monkeypatch
):
    pytest.importorskip({"pytorch": "torch", "jax": "flax"}[framework])
    network = importlib.import_module(f"benchmarks.rosetta.cnn_{framework}").Network
    base = network.__mro__[1]

    def still(self, *mode):  # PyTorch's own `eval` comes through here as well.
        del mode
        base.train(self, False) if framework == "pytorch" else base.eval(self)

    other = {"eval": base.train, "train": still}[changed]
    monkeypatch.setattr(network, changed, other)
    assert shown in fault(reference, given, framework)


def misread_rates(monkeypatch, misread):
    """Has TensorFlow's network take other rates, by a layer's number and its own."""
    network = importlib.import_module("benchmarks.rosetta.cnn_tensorflow").Network
    right = network.__init__

    def changed(self, dropout):
        right(self, tuple(misread(*one) for one in enumerate(dropout)))

    monkeypatch.setattr(network, "__init__", changed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_forgotten_dropout_layer_is_noticed(reference, given, number, monkeypatch):
    misread_rates(monkeypatch, lambda n, rate: 0 if n == number else rate)
    said = fault(reference, given, "tensorflow")
    assert f"dropout layer {number + 1} alone" in said or "dropout adds" in said


@pytest.mark.slow
def test_kept_and_dropped_parts_mixed_up_are_noticed(reference, given, monkeypatch):
    misread_rates(monkeypatch, lambda n, rate: 1 - rate if rate else 0)
    assert "dropout adds" in fault(reference, given, "tensorflow")


@pytest.mark.slow
def test_what_dropout_adds_is_known_well_enough_for_its_bounds(reference):
    rises = reference(TASKS["cnn"]).rises
    error = np.std(rises, ddof=1) / np.mean(rises) / len(rises) ** 0.5
    # A ratio of two such means is as uncertain as both together. A right row is further
    # away than 5 deviations less than once in a million times.
    nearest = min(abs(np.log(bound)) for bound in parity.RISE_BOUNDS)
    assert nearest > 5 * 2**0.5 * error


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, -1])
def test_a_word_that_is_in_no_batch_counts_too(gru_reference, place, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.gru_tensorflow")
    right = module.Model.load

    def load(self, values):
        name = "embedding/embedding"
        changed = {**values, name: values[name].copy()}
        changed[name][place, 0] += 0.01
        right(self, changed)

    monkeypatch.setattr(module.Model, "load", load)
    assert "given values" in gru_fault(*gru_reference, "tensorflow")


def moved(optimizer, gradient):
    """Returns what one update makes of zeros."""
    variable = keras.Variable(np.zeros((4, 2), np.float32))
    optimizer.build([variable])
    optimizer.apply([gradient], [variable])
    return variable.numpy()


def test_a_word_that_occurs_twice_moves_as_by_its_whole_gradient():
    module = importlib.import_module("benchmarks.rosetta.gru_keras")
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, -1.0], [2.0, 2.0]]), [1, 3, 1], [4, 2]
    )
    whole = moved(module.Adam(0.1), tf.convert_to_tensor(slices))
    np.testing.assert_allclose(moved(module.Adam(0.1), slices), whole, rtol=1e-6)
    # Keras's own would not need ours otherwise.
    assert np.abs(moved(keras.optimizers.Adam(0.1), slices) - whole).max() > 0.01


@pytest.mark.slow
def test_an_adam_that_squares_slices_is_noticed(gru_reference, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.gru_keras")
    monkeypatch.setattr(module, "Adam", keras.optimizers.Adam)
    assert "two steps change embedding" in gru_fault(*gru_reference, "keras")


@pytest.mark.slow
def test_averaged_gradients_are_another_momentum(reference, given, monkeypatch):
    right = tf.raw_ops.ResourceApplyMomentum

    def dampened(*, grad, momentum, **others):
        right(grad=grad * (1 - momentum), momentum=momentum, **others)

    monkeypatch.setattr(tf.raw_ops, "ResourceApplyMomentum", dampened)
    assert "two steps change" in fault(reference, given, "tensorflow", STILL)


@pytest.mark.slow
def test_training_without_dropout_is_noticed(reference, given, monkeypatch):
    def without(*arguments, training):
        del training
        return right(*arguments, training=False)

    right = models.inference
    monkeypatch.setattr(models, "inference", without)
    assert "dropout adds" in fault(reference, given, "towers")


@pytest.mark.slow
def test_dropout_in_testing_is_noticed(reference, given, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.cnn_tensorflow")
    right = module.Network.__call__

    def always(self, values, images, *, training):
        del training
        return right(self, values, images, training=True)

    monkeypatch.setattr(module.Network, "__call__", always)
    assert "is dropout on?" in fault(reference, given, "tensorflow")


@pytest.mark.slow
def test_a_second_softmax_is_noticed(reference, given, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.cnn_tensorflow")
    right = module.Network.__call__

    def with_softmax(*arguments, training):
        return tf.nn.softmax(right(*arguments, training=training))

    monkeypatch.setattr(module.Network, "__call__", with_softmax)
    assert "its logits differ" in fault(reference, given, "tensorflow", STILL)


@pytest.mark.peers
def test_pytorch_keeps_channels_last_in_memory(given):
    torch = pytest.importorskip("torch")
    values, (images, _), _ = given
    model = importlib.import_module("benchmarks.rosetta.cnn_pytorch").Model(
        TASKS["cnn"]
    )
    model.load(values)
    for tensor in (model.network.conv2.weight, model.load_inputs(images)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_values_in_pytorchs_layout_and_back_are_the_same():
    for network in TASKS:
        values = initial_values(network)
        for name in values:
            if name.endswith("bias"):
                values[name] = np.arange(values[name].size, dtype=np.float32)
                values[name] = values[name].reshape(initial_values(network)[name].shape)
        back = weights.from_pytorch(weights.to_pytorch(values))
        assert back.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(back[name], value)


def test_a_value_that_is_not_a_number_is_complained_of():
    sound = {"a": np.ones(2)}
    broken = {"a": np.array([1.0, np.nan])}
    task = TASKS["cnn"]
    one = parity.Evidence(1.0, np.ones(2), sound, sound, True, [0.2], [0.1], True)
    for change in (
        {"loss": np.nan},
        {"logits": np.full(2, np.nan)},
        {"gradients": broken},
        {"updates": broken},
        {"rises": [np.nan]},
        {"spreads": [np.nan]},
        {"begins": False},
        {"gradients": {"a": np.ones(3)}},
    ):
        other = dataclasses.replace(one, **change)
        assert parity.complaint(parity.compare(one, other, task)), change
    assert parity.complaint(parity.compare(one, one, task)) == ""
