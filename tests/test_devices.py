"""Which devices the towers get; GPUs are pretended, so no test needs one."""

import types

import pytest
import tensorflow as tf

from cifar10.config import cli
from cifar10.errors import EXIT_USAGE, MissingGpuError, UsageError
from cifar10.towers import devices


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Makes TensorFlow list some GPUs and records how they are configured."""

    def pretend(count):
        gpus = [types.SimpleNamespace(name=f"GPU:{n}") for n in range(count)]
        done = {"visible": None, "growth": []}
        monkeypatch.setattr(
            tf.config,
            "list_physical_devices",
            lambda kind: gpus if kind == "GPU" else [],
        )
        monkeypatch.setattr(
            tf.config,
            "set_visible_devices",
            lambda chosen, kind: done.update(visible=[gpu.name for gpu in chosen]),
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "set_memory_growth",
            lambda gpu, on: done["growth"].append((gpu.name, on)),
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda gpu: {"device_name": "NVIDIA H200"},
        )
        return done

    return pretend


def test_one_tower_per_gpu_by_default(pretend_gpus):
    done = pretend_gpus(3)
    placement = devices.place_towers(None)
    assert placement.devices == ("/gpu:0", "/gpu:1", "/gpu:2")
    assert not placement.simulated
    assert placement.description == "3 towers on NVIDIA H200"
    assert done["growth"] == [("GPU:0", True), ("GPU:1", True), ("GPU:2", True)]


def test_only_the_gpus_that_are_used_are_taken(pretend_gpus):
    done = pretend_gpus(4)
    assert devices.place_towers(2).devices == ("/gpu:0", "/gpu:1")
    assert done["visible"] == ["GPU:0", "GPU:1"]


def test_fewer_gpus_than_asked_for_is_refused_with_two_ways_on(pretend_gpus):
    pretend_gpus(2)
    with pytest.raises(UsageError) as caught:
        devices.place_towers(4)
    message = str(caught.value)
    assert "--num_gpus 4" in message
    assert "has 2 (NVIDIA H200, NVIDIA H200)" in message
    assert "--num_gpus 2" in message
    assert "CUDA_VISIBLE_DEVICES=-1" in message


@pytest.mark.parametrize(
    "place",
    [lambda: devices.place_towers(4), lambda: devices.place_evaluation("gpu:2")],
)
def test_where_gpus_are_missing_the_reasons_stand_below(pretend_gpus, place, capsys):
    pretend_gpus(2)
    with pytest.raises(SystemExit) as ended:
        cli.run(place, explain_missing_gpus=lambda: "PROBLEM: a. FIX: b.")
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err.endswith(".\nPROBLEM: a. FIX: b.\n")


def test_without_a_gpu_towers_are_simulated_and_it_says_so(four_cpus):
    del four_cpus
    placement = devices.place_towers(4)
    assert placement.devices == ("/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3")
    assert placement.simulated
    assert "4 SIMULATED towers" in placement.description
    assert "no GPU was found" in placement.description


@pytest.mark.parametrize("asked", [None, 1])
def test_one_tower_on_the_cpu_is_no_simulation(asked):
    placement = devices.place_towers(asked)
    assert placement.devices == ("/cpu:0",)
    assert not placement.simulated
    assert "no GPU was found" in placement.description


@pytest.fixture
def unusable_gpu(monkeypatch, tmp_path):
    """A machine with a driver and without the libraries that TensorFlow needs."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_NVIDIA_DRIVERS", [tmp_path / "nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_that_tensorflow_cannot_use_is_not_simulated(count):
    with pytest.raises(MissingGpuError) as caught:
        devices.place_towers(count)
    message = str(caught.value)
    assert "has an NVIDIA GPU, but TensorFlow cannot use it" in message
    for way_on in ("doctor", "CUDA_VISIBLE_DEVICES=-1"):
        assert way_on in message


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("hidden", ["-1", ""])
def test_a_gpu_that_was_hidden_on_purpose_is_not_missed(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    placement = devices.place_towers(2)
    assert placement.simulated
    assert "no GPU was found" in placement.description


@pytest.mark.usefixtures("unusable_gpu")
def test_a_gpu_that_tensorflow_cannot_use_is_never_called_absent():
    placement = devices.place_towers(None)
    assert placement.devices == ("/cpu:0",)
    assert "no GPU was found" not in placement.description
    assert "TensorFlow cannot use the NVIDIA GPU" in placement.description
    assert "python -m cifar10 doctor says why" in placement.description


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("auto", ["GPU:0"], "/gpu:0"),
        ("gpu", ["GPU:0"], "/gpu:0"),
        ("gpu:1", ["GPU:1"], "/gpu:0"),
        ("cpu", [], "/cpu:0"),
    ],
)
def test_an_evaluation_takes_its_device_and_no_other(
    pretend_gpus, device, visible, expected
):
    done = pretend_gpus(2)
    assert devices.place_evaluation(device) == expected
    assert done["visible"] == visible


@pytest.mark.parametrize("device", ["gpu:2", "gpu:x", "gpu:", "tpu", "cpu:1"])
def test_a_device_that_is_not_there_is_named(pretend_gpus, device):
    pretend_gpus(2)
    with pytest.raises(UsageError, match=f"--device {device}"):
        devices.place_evaluation(device)
