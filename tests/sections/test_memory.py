"""How much memory a step takes, from its graph, and what `plan` says of it."""

import itertools
import math

import keras
import pytest
import tensorflow as tf

from benchmarks import sections as benchmark
from cifar10 import hardware
from cifar10.errors import UsageError
from cifar10.model import inference, loss
from cifar10.sections import planning
from cifar10.towers import devices
from cifar10.towers.towers import Tower
from cifar10.towers.update import TrainState


def test_a_plan_counts_the_tensors_of_the_gradients():
    """The images and the outputs of ReLU, but neither its inputs nor other shapes."""
    side, channels = 8, 4
    layers = []
    for _ in range(4):
        layers += [keras.layers.Conv2D(channels, 3, padding="same", use_bias=False)]
        layers += [keras.layers.ReLU()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(5, use_bias=False)]
    model = keras.Sequential([keras.Input((side, side, channels)), *layers])
    state = TrainState(model, keras.optimizers.SGD(0.1))
    tower = Tower(inference, loss)
    sizes = []
    for batch in (100, 200):
        images = tf.TensorSpec([batch, side, side, channels])
        planner = planning.Planner(state, tower, ["/gpu:0"], images)
        sizes.append(planner.plain.tower_bytes)
    # Besides, 1.2 times what the gradient of a convolution reads and writes.
    tensor = 4 * 100 * side * side * channels
    assert sizes[1] - sizes[0] == pytest.approx((1 + 4 + 2 * 1.2) * tensor, rel=0.05)


def placed(*names):
    return devices.Placement(names, simulated=False, description="")


def limit_on(*names, held=0):
    return planning.memory_limit(None, placed(*names), held)


def test_a_step_may_take_most_of_the_known_free_memory(monkeypatch):
    for free, limit in ((7 * 10**12, 0.85 * 7 * 10**12), (None, math.inf)):
        monkeypatch.setattr(hardware, "available_memory", lambda free=free: free)
        assert limit_on("/cpu:0") == limit


def test_a_gpus_limit_follows_the_driver_or_the_size_of_its_part(monkeypatch):
    part = tf.config.LogicalDeviceConfiguration(memory_limit=100)
    parts = {"whole": None, "split": [part, part]}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: [*parts])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", parts.get)
    monkeypatch.setattr(devices, "free_memory", lambda _: 60 * 2**20)
    assert limit_on("/gpu:0", "/gpu:2") == 0.85 * 60 * 2**20
    assert limit_on("/gpu:1", "/gpu:2") == 0.85 * 100 * 2**20


@pytest.mark.parametrize("error", [OSError("no library"), UsageError("no answer")])
def test_a_gpu_whose_driver_is_silent_has_no_limit(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["whole"])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: None)
    monkeypatch.setattr(devices, "free_memory", fail)
    assert limit_on("/gpu:0") == math.inf


def test_the_limit_of_a_cpu_is_a_part_of_its_free_memory_unless_it_is_given(
    monkeypatch,
):
    monkeypatch.setattr(hardware, "available_memory", lambda: 400)
    assert limit_on("/cpu:0", held=100) == 440
    assert planning.memory_limit(2.0, placed("/cpu:0"), 100) == 2e9


@pytest.mark.soak
@pytest.mark.parametrize("sections", [1, 3])
def test_plans_are_close_to_measurements(sections, real_data_dir, monkeypatch):
    """Three models, three sizes of batch, each in a process of its own."""
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)  # As a user's.
    options = {"precision": "float32", "warm": False}
    options |= benchmark.real_images(str(real_data_dir), 3000)
    names = ("tutorial", "resnet", "airbench")
    for model, size in itertools.product(names, (128, 500, 1000)):
        rows = benchmark.make_rows(model, size, [sections], **options)
        [row] = [one for one in rows if one.options["sections"] == sections][:1]
        [result] = benchmark.compare([row], 1)
        assert result.is_measured, result.problem
        ratio = result.facts["planned"] / result.facts["measured"]
        assert 0.8 <= ratio <= 1.25, (model, size)
