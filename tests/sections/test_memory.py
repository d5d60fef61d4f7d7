"""How much memory a step takes, from its graph, and what `plan` says of it."""

import json
import resource
import types

import pytest
import tensorflow as tf

import runs
from cifar10.sections import memory, planning
from cifar10.towers import devices, hardware


def test_parts_keep_what_is_used_behind_them():
    @tf.function(autograph=False)
    def function(images, filters):
        begin = tf.nn.relu(tf.reshape(images, [2, 8, 8, 4]))
        net = tf.nn.conv2d(begin, filters, 1, "SAME")
        ends.append(len(net.graph.get_operations()))
        net = tf.nn.relu(
            tf.identity(net)
        )  # The copy is freed, and so is what it reads.
        tf.nn.conv2d(net, filters, 1, "SAME")  # Nothing depends on it.
        ends.append(len(net.graph.get_operations()))
        gradient = tf.nn.relu(net) * begin
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=[2, 8, 8, 4],
            filter=filters,
            out_backprop=gradient,
            strides=[1, 1, 1, 1],
            padding="SAME",
        )

    ends = []
    specs = [tf.TensorSpec([2, 16, 16]), tf.TensorSpec([3, 3, 4, 4])]
    traced = function.get_concrete_function(*specs)
    found = memory.costs(traced.graph, traced.outputs, ends)
    size = 4 * 2 * 8 * 8 * 4
    assert found.kept == [size, size]
    assert found.convolutions == 2
    assert 2 * size <= found.workspace <= 3 * size


def placed(*names):
    return devices.Placement(names, simulated=False, description="")


def test_free_memory_is_what_every_limit_leaves(monkeypatch):
    found = hardware.Memory(total=9 * 10**12, available=7 * 10**12)
    monkeypatch.setattr(hardware, "memory", lambda: found)
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert memory.free(placed("/cpu:0")) == 7 * 10**12
    # Address space that is used already does not count, and of the rest the half.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**13, 10**13))
    assert 4.9e12 < memory.free(placed("/cpu:0")) < 5e12


def test_free_memory_of_a_gpu_is_the_drivers_or_that_of_its_part(monkeypatch):
    part = tf.config.LogicalDeviceConfiguration(memory_limit=100)
    parts = {"whole": None, "split": [part, part]}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: [*parts])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", parts.get)
    monkeypatch.setattr(devices, "free_memory", lambda _: 60 * 2**20)
    assert memory.free(placed("/gpu:0", "/gpu:2")) == 60 * 2**20
    assert memory.free(placed("/gpu:1", "/gpu:2")) == 100 * 2**20


def test_workers_share_the_memory_of_a_cpu(monkeypatch):
    planner = types.SimpleNamespace(bytes_so_far=100)
    monkeypatch.setattr(memory, "free", lambda _: 400)
    for device, expected in (("/cpu:0", 270.0), ("/gpu:0", 440.0)):
        assert planning.memory_limit(None, placed(device), planner, 2) == expected


@pytest.mark.soak
@pytest.mark.parametrize("sections", [1, 3])
def test_plans_are_close_to_what_is_measured(tmp_path, sections, real_data_dir):
    """Three models, three sizes of batch, each in a process of its own."""
    out = tmp_path / "plans.json"
    names = ["--models", "tutorial", "resnet", "airbench"]
    flags = runs.flags(json=out, sections=sections, data_dir=real_data_dir)
    done = runs.run_anew("-m", "benchmarks.sections", *names, *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len({(row["model"], row["batch_size"]) for row in rows}) == 9
    assert all(0.8 <= row["ratio"] <= 1.25 for row in rows), rows
