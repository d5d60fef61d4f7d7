"""How much memory a step takes, from its graph, and what `plan` says of it."""

import json
import resource
import types

import keras
import pytest
import tensorflow as tf
from tensorflow.python.client import device_lib

import runs
from cifar10.config.config import Config
from cifar10.sections import assembly, memory
from cifar10.towers import devices, hardware

MEGABYTE = 2**18  # Of float32.


def peak(function, *shapes, kind="cpu"):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return memory.peak(traced.graph, traced.outputs, kind) / 2**20


def test_tensors_live_as_long_as_they_are_needed():
    for function, megabytes in [
        # The argument is the caller's; the second operation writes into the first's.
        (lambda x: tf.nn.relu(x + 1.0), 1),
        # The sum is needed twice, so the product cannot be written into it.
        (lambda x: (y := x + 1.0) + tf.nn.relu(tf.reverse(y * 2.0, [0])), 3),
        # A tensor is freed after the last that takes it.
        (lambda x: tf.reverse(tf.reverse(tf.reverse(x, [0]), [0]), [0]), 2),
        # Another shape is the same memory.
        (lambda x: tf.reshape(tf.reverse(x, [0]), [-1, 2]), 1),
        # What nobody needs is not computed.
        (lambda x: [tf.reverse(x, [0]), tf.concat([x, x], 0)][0], 1),
    ]:
        assert peak(function, [MEGABYTE]) == pytest.approx(megabytes, abs=1e-4)


def test_a_function_takes_its_own_peak_beside_what_is_held():
    @tf.function(autograph=False)
    def called(x):
        y = tf.reverse(tf.reverse(tf.reverse(x, [0]), [0]), [0])
        return y, tf.reshape(y, [-1, 2])  # One megabyte under two names.

    def function(x):
        held = tf.reverse(x, [0])
        first, second = called(held)
        return held, first, second

    assert peak(called, [MEGABYTE]) == pytest.approx(2, abs=1e-4)
    assert peak(function, [MEGABYTE]) == pytest.approx(3, abs=1e-4)


def test_only_the_device_that_is_meant_counts():
    def function(x):
        with tf.device("/gpu:0"):
            y = tf.reverse(x, [0])
        with tf.device("/cpu:0"):
            return tf.identity(y)

    assert peak(function, [MEGABYTE], kind="gpu") == pytest.approx(1)
    assert peak(function, [MEGABYTE], kind="cpu") == pytest.approx(1)


def placed(*names):
    return devices.Placement(names, simulated=False, description="")


def test_free_memory_is_what_every_limit_leaves(four_cpus, monkeypatch):
    found = hardware.Memory(total=9 * 10**12, available=7 * 10**12)
    monkeypatch.setattr(hardware, "memory", lambda: found)
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert assembly.free_memory(placed("/cpu:0")) == 7 * 10**12
    # Address space that is used already does not count, and of the rest the half.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**13, 10**13))
    assert 4.9e12 < assembly.free_memory(placed("/cpu:0")) < 5e12

    def open_all():
        pytest.fail("this opens every GPU, whoever uses it")

    monkeypatch.setattr(device_lib, "list_local_devices", open_all)
    limits = assembly.memory_limits()
    assert [*limits] == [*four_cpus]
    assert all(limit > 0 for limit in limits.values())
    monkeypatch.setattr(assembly, "memory_limits", lambda: {"/gpu:0": 8, "/gpu:1": 6})
    assert assembly.free_memory(placed("/gpu:0", "/gpu:1")) == 6


def test_workers_share_the_memory_of_a_cpu(monkeypatch):
    planner = types.SimpleNamespace(bytes_so_far=lambda: 100)
    config = Config()
    monkeypatch.setattr(assembly, "free_memory", lambda _: 400)
    for device, expected in (("/cpu:0", 270.0), ("/gpu:0", 440.0)):
        assert assembly.memory_limit(config, placed(device), planner, 2) == expected


@pytest.mark.slow
def test_plan_says_what_fits(monkeypatch):
    # In a process of its own, in which one operation is computed at a time.
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
    flags = runs.flags(model="resnet", depth=3, width=4, num_gpus=2)
    flags += runs.flags(precision="float32", batch_size=512, memory_limit=0.14)
    found = runs.run("-m", "cifar10", "plan", "--recipe", "tutorial", *flags)
    assert found.returncode == 0, found.stderr
    for name in ("variables", "moving averages", "optimizer", "gradients"):
        assert f"\n{name} " in found.stdout
    rows = [line.split() for line in found.stdout.splitlines() if "%" in line]
    totals = [float(row[3].replace(",", "")) for row in rows]
    assert [row[0] for row in rows][:2] == ["1", "2"]
    assert totals == sorted(totals, reverse=True)
    fits = next(row[0] for row, total in zip(rows, totals, strict=True) if total <= 140)
    assert fits != "1"
    assert f"{fits} sections" in " ".join(found.stdout.split())


def test_plan_of_the_largest_batch_says_that_nothing_fits():
    flags = runs.flags(batch_size=10**6, sections=1, memory_limit=1, model=runs.SMALL)
    found = runs.call("cifar10/__main__.py", "plan", *flags)
    assert found.returncode == 1
    assert "none" in found.stdout


def test_a_model_larger_than_the_memory_is_refused_unbuilt():
    for width in (100_000, 10**12):
        flags = runs.flags(model="resnet", width=width)
        found = runs.call("cifar10/__main__.py", "plan", *flags)
        assert found.returncode == 2
        assert f"--width {width}" in found.stderr
    with keras.StatelessScope():  # Its end gives values to variables that wait.
        pass


@pytest.mark.soak
@pytest.mark.parametrize("sections", [1, 3])
def test_plans_are_within_a_fifth_of_what_is_measured(
    tmp_path, sections, real_data_dir
):
    """Three models, three sizes of batch, each in a process of its own."""
    out = tmp_path / "plans.json"
    names = ["--models", "tutorial", "resnet", "airbench"]
    flags = runs.flags(json=out, sections=sections, data_dir=real_data_dir)
    done = runs.run_anew("-m", "benchmarks.sections", *names, *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len({(row["model"], row["batch_size"]) for row in rows}) == 9
    assert all(0.8 <= row["ratio"] <= 1.2 for row in rows), rows
