"""How much memory a step takes, from its graph, and what `plan` says of it."""

import json
import resource
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client import device_lib

import runs
from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.sections import assembly, memory
from cifar10.sections.assembly import free_memory
from cifar10.towers import devices, hardware

MEGABYTE = 2**18  # Of float32.


def peak(function, *shapes, kind="cpu"):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return memory.peak(traced.graph, traced.outputs, kind) / 2**20


@pytest.mark.parametrize(
    ("function", "megabytes"),
    [
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
    ],
)
def test_tensors_live_as_long_as_they_are_needed(function, megabytes):
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


def test_multiplications_are_counted_where_they_are():
    def function(images, filters, matrix):
        net = tf.nn.conv2d(images, filters, 1, "SAME")
        return tf.matmul(tf.reshape(net, [2, -1]), matrix)

    shapes = [(2, 4, 4, 3), (3, 3, 3, 5), (80, 7)]
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function).get_concrete_function(*specs).graph
    kinds = [op.type for op in graph.get_operations()]
    ends = [kinds.index("Conv2D") + 1, kinds.index("MatMul"), len(kinds)]
    expected = [2 * 4 * 4 * 5 * 27, 0, 2 * 80 * 7]
    assert memory.multiplications(graph, ends) == expected


def test_free_memory_is_what_every_limit_leaves(monkeypatch):
    placement = devices.Placement(("/cpu:0",), simulated=False, description="")
    found = hardware.Memory(total=9 * 10**12, available=7 * 10**12)
    monkeypatch.setattr(hardware, "memory", lambda: found)
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert free_memory(placement) == 7 * 10**12
    # Address space that is used already does not count, and of the rest the half.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**13, 10**13))
    assert 4.9e12 < free_memory(placement) < 5e12


def test_the_limits_of_the_devices_are_those_of_this_process(four_cpus, monkeypatch):
    def open_all():
        pytest.fail("this opens every GPU, whoever uses it")

    monkeypatch.setattr(device_lib, "list_local_devices", open_all)
    found = assembly.memory_limits()
    assert [*found] == [*four_cpus]
    assert all(limit > 0 for limit in found.values())
    monkeypatch.setattr(assembly, "memory_limits", lambda: {"/gpu:0": 8, "/gpu:1": 6})
    both = devices.Placement(("/gpu:0", "/gpu:1"), simulated=False, description="")
    assert free_memory(both) == 6


@pytest.mark.parametrize(("device", "expected"), [("/cpu:0", 270.0), ("/gpu:0", 440.0)])
def test_workers_share_the_memory_of_a_cpu(monkeypatch, device, expected):
    placement = devices.Placement((device,), simulated=False, description="")
    planner = types.SimpleNamespace(bytes_so_far=lambda: 100)
    config = types.SimpleNamespace(memory_limit=None)
    monkeypatch.setattr(assembly, "free_memory", lambda _: 400)
    assert assembly.memory_limit(config, placement, planner, 2) == expected


@pytest.mark.slow
def test_plan_says_what_fits(monkeypatch):
    flags = [
        "--recipe",
        "tutorial",
        "--model",
        "resnet",
        "--depth",
        "3",
        "--width",
        "4",
        "--num_gpus",
        "2",
    ]
    flags += ["--precision", "float32"]
    flags += ["--batch_size", "512", "--memory_limit", "0.14"]
    # In a process of its own, in which one operation is computed at a time.
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
    found = runs.run("-m", "cifar10", "plan", *flags)
    assert found.returncode == 0, found.stderr
    assert "2 SIMULATED towers on the CPU" in found.stdout
    for name in ("variables", "moving averages", "optimizer", "gradients"):
        assert f"\n{name} " in found.stdout
    rows = [line.split() for line in found.stdout.splitlines() if "%" in line]
    totals = [float(row[3].replace(",", "")) for row in rows]
    assert [row[0] for row in rows][:2] == ["1", "2"]
    assert totals == sorted(totals, reverse=True)
    fits = next(row[0] for row, total in zip(rows, totals, strict=True) if total <= 140)
    assert fits != "1"
    said = " ".join(found.stdout.split())
    assert f"Into 140.0 MB fit {fits} sections: --sections=scale" in said
    assert max(map(len, found.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_plan_says_when_nothing_fits():
    flags = ["--batch_size", "64", "--memory_limit", "0.02"]
    found = runs.call("cifar10/__main__.py", "plan", *flags)
    assert found.returncode == 1
    assert "none of these fits; the least is" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_plan_says_on_stderr_what_it_is_doing():
    found = runs.call("cifar10/__main__.py", "plan", "--batch_size", 8, "--sections", 1)
    assert found.returncode == 0
    assert found.stderr.splitlines()[-3:] == [
        "Building the model tutorial ...",
        "Tracing the layers ...",
        "Tracing a step with --sections 1 ...",
    ]
    assert "..." not in found.stdout


def test_a_depth_is_for_models_that_take_one():
    with pytest.raises(UsageError, match="--depth 4: the model tutorial has no depth"):
        models.build("tutorial", (24, 24, 3), 10, options={"depth": 4})
    with pytest.raises(UsageError, match="--depth 2: this model has 3 scales of at"):
        models.build("resnet", (24, 24, 3), 10, options={"depth": 2})
    with pytest.raises(UsageError, match="--depth 121: the maximum is 120"):
        models.build("resnet", (24, 24, 3), 10, options={"depth": 121})


@pytest.mark.parametrize("flags", [("--width", 100_000), ("--width", 10**12)])
def test_a_model_larger_than_the_memory_is_refused_unbuilt(flags):
    found = runs.call("cifar10/__main__.py", "plan", "--model", "resnet", *flags)
    assert found.returncode == 2
    assert f"{flags[0]} {flags[1]}: the model has" in found.stderr
    assert "Give a smaller number." in found.stderr
    with (
        keras.StatelessScope()
    ):  # Its end gives values to variables that wait for them.
        pass


def test_the_size_of_a_model_is_counted_without_changing_it():
    options, room = {"depth": 3, "width": 4}, 10**9
    models_built = [
        models.build("resnet", (24, 24, 3), 10, options=options, room=room)
        for room in (None, room)
    ]
    values = [[v.numpy() for v in model.variables] for model in models_built]
    for one, other in zip(*values, strict=True):
        np.testing.assert_array_equal(one, other)
    count = models_built[0].count_params()
    with pytest.raises(UsageError, match=f"--depth 3 --width 4: .* {count:,} param"):
        models.build("resnet", (24, 24, 3), 10, options=options, room=8 * count - 1)


@pytest.mark.slow
def test_the_largest_batch_can_be_planned():
    flags = ["--batch_size", 10**6, "--sections", 1, "--memory_limit", 1]
    found = runs.call("cifar10/__main__.py", "plan", *flags)
    assert found.returncode == 1
    assert "none of these fits" in found.stdout


@pytest.mark.soak
@pytest.mark.parametrize("sections", [1, 3])
def test_plans_are_within_a_fifth_of_what_is_measured(
    tmp_path, sections, real_data_dir
):
    """Three models, three sizes of batch, each in a process of its own."""
    out = tmp_path / "plans.json"
    command = [sys.executable, "-m", "benchmarks.sections", "--json", str(out)]
    command += ["--models", "tutorial", "resnet", "airbench"]
    command += ["--sections", str(sections), "--data_dir", str(real_data_dir)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    rows = json.loads(out.read_text())["rows"]
    assert len({(row["model"], row["batch_size"]) for row in rows}) == 9
    assert all(0.8 <= row["ratio"] <= 1.2 for row in rows), rows
