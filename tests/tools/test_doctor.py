"""The doctor on made-up machines: no GPU is needed, and none would disturb."""

import argparse
import json

import pytest
import tensorflow as tf

from cifar10.tools import doctor

TWO = "8.0, 550.54\n8.0, 550.54"
INSTALL = "tensorflow[and-cuda]"


@pytest.fixture(autouse=True)
def say(tmp_path, monkeypatch):
    """Returns a function that decides what nvidia-smi does; at first there is none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def say(text, command="exit 0"):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\n{command}\n")
        program.chmod(0o755)

    return say


@pytest.fixture
def find(monkeypatch):
    """Returns a function that decides what the child finds with TensorFlow."""

    def find(gpus, end="", computes=None, has_cuda=True):
        devices = ["/cpu:0", *(f"/gpu:{number}" for number in range(gpus))]
        facts = {"version": "2.21.0", "keras": "3.15.0", "has_cuda": has_cuda}
        lines = [json.dumps({**facts, "devices": devices}), *devices[:computes]]
        code = f"import os, sys; print({chr(10).join(lines)!r}, flush=True); {end}"
        monkeypatch.setattr(doctor, "_CHILD", code)

    return find


def diagnose(capsys):
    """Returns the exit code of the doctor, and the lines that it prints."""
    code = doctor.main(argparse.ArgumentParser(), [])
    return code, capsys.readouterr().out.splitlines()


MISSING = "sys.stderr.write(\"W] Could not load dynamic library 'libcudnn.so.9'; x\")"


@pytest.mark.parametrize(
    ("driver", "found", "finding", "fix"),
    [
        # TensorFlow finds no GPU.
        (TWO, {"gpus": 0, "has_cuda": False}, "without CUDA", "pip uninstall"),
        (TWO, {"gpus": 0, "end": MISSING}, "cannot load libcudnn.so.9", INSTALL),
        (TWO, {"gpus": 1}, "finds 1 of 2", INSTALL),
        # The driver is too old for CUDA 12, or for the small kernels of Hopper.
        ("8.0, 520.61", {"gpus": 1}, "driver 525", "Install NVIDIA's"),
        ("9.0, 550.54", {"gpus": 1}, "driver 555", "Install NVIDIA's"),
        # What TensorFlow finds does not work.
        (
            TWO,
            {"gpus": 2, "computes": 2, "end": "sys.exit('no handle')"},
            "/gpu:1: a computation ended with exit code 1: no handle",
            "CUDA_VISIBLE_DEVICES=-1",
        ),
        (
            TWO,
            {"gpus": 2, "computes": 1, "end": "os.kill(os.getpid(), 6)"},
            "/gpu:0: a computation ended with SIGABRT",
            "gpu-old",
        ),
    ],
)
def test_each_problem_has_its_fix(driver, found, finding, fix, say, find, capsys):
    say(driver)
    find(**found)
    code, lines = diagnose(capsys)
    (problem,) = [line for line in lines if line.startswith("PROBLEM: ")]
    assert finding in problem
    assert fix in problem.partition("FIX: ")[2]
    assert code == 1
    assert lines[-1] == "1 problem"
    assert doctor.explain_missing_gpus() == problem


def test_a_crashing_child_is_reported_as_a_tensorflow_problem(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_CHILD", "import os; os.kill(os.getpid(), 4)")
    code, lines = diagnose(capsys)
    (problem,) = [line for line in lines if line.startswith("PROBLEM: ")]
    assert "TensorFlow: a computation ended with SIGILL" in problem
    assert "AVX" in problem
    assert code == 1


@pytest.mark.parametrize(
    ("text", "command", "finding"),
    [
        ("has failed", "exit 9", "has failed"),
        ("", "exec /bin/sleep 1000", "no answer within 1 s"),
    ],
)
def test_a_failing_driver_is_reported_and_not_asked_again(
    text, command, finding, say, find, monkeypatch, capsys
):
    monkeypatch.setattr(doctor, "_DRIVER_SECONDS", 1.0)
    say(text, command)
    find(0, end="print(os.environ['CUDA_VISIBLE_DEVICES'])")
    code, lines = diagnose(capsys)
    (problem,) = [line for line in lines if line.startswith("PROBLEM: ")]
    assert finding in problem
    assert "restart the machine" in problem
    assert "-1: computes correctly" in lines
    assert code == 1


def test_a_blackwell_gpu_and_a_driver_of_cuda_13_are_explained(say, find, capsys):
    for capability, is_noted in (("8.9", False), ("10.0", True), ("12.0", True)):
        say(f"{capability}, 580.65")
        find(1)
        code, lines = diagnose(capsys)
        assert code == 0
        assert sum("CUDA 13" in line for line in lines) == 1
        assert any(line.startswith("NOTE: ") for line in lines) is is_noted
        assert ("Blackwell" in doctor.explain_missing_gpus()) is is_noted


def test_an_amd_gpu_gets_no_advice_for_nvidia_gpus(find, tmp_path, monkeypatch, capsys):
    find(0)
    monkeypatch.setattr(doctor, "_AMD_DRIVER", tmp_path)
    code, lines = diagnose(capsys)
    (note,) = [line for line in lines if line.startswith("NOTE: ")]
    assert "AMD" in note
    assert "NVIDIA's driver" not in note
    assert code == 0


def test_two_keras_packages_in_a_folder_are_reported(
    find, tmp_path, monkeypatch, capsys
):
    find(0)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, version in (("keras", "3.15.1"), ("keras_nightly", "3.16.0.dev1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    code, lines = diagnose(capsys)
    (problem,) = [line for line in lines if line.startswith("PROBLEM: ")]
    assert "pip uninstall -y keras-nightly keras" in problem
    assert code == 1


@pytest.mark.parametrize("text", [None, "No devices were found"])
def test_machine_without_a_gpu_or_driver_gets_a_note(text, say, find, capsys):
    find(0)
    if text:
        say(text, "exit 6")
    code, lines = diagnose(capsys)
    (note,) = [line for line in lines if line.startswith("NOTE: ")]
    assert "no NVIDIA GPU" in note
    assert "--gpus all" in note
    assert code == 0
    assert lines[-1] == "No problem was found."
    # Also if a flag of the training requests a GPU.
    assert doctor.explain_missing_gpus() == note


def test_hidden_gpus_are_reported(say, find, monkeypatch, capsys):
    say(TWO)
    find(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    code, lines = diagnose(capsys)
    (note,) = [line for line in lines if line.startswith("NOTE: ")]
    assert "finds 1 of 2" in note
    assert "Unset CUDA_VISIBLE_DEVICES" in note
    assert code == 0


def test_healthy_machine_gets_no_advice(say, find, monkeypatch, capsys):
    say(TWO)
    find(2)
    asked = []
    monkeypatch.setattr(doctor.gpu_links, "find_fault", lambda a: asked.append(a) or "")
    code, lines = diagnose(capsys)
    assert not [line for line in lines if "FIX" in line]
    assert "/gpu:1: computes correctly" in lines
    assert asked == [["/gpu:0", "/gpu:1"]]
    assert "NCCL" in lines[-2]
    assert code == 0
    assert doctor.explain_missing_gpus() == ""


def test_gpus_without_working_copies_are_reported(say, find, monkeypatch, capsys):
    say(TWO)
    find(2)
    monkeypatch.setattr(doctor.gpu_links, "_CHILD", "import sys; sys.exit(3)")
    code, lines = diagnose(capsys)
    (note,) = [line for line in lines if line.startswith("NOTE: ")]
    assert "copies from /gpu:0 to /gpu:1" in note
    assert "NCCL_P2P_DISABLE=1" in note
    assert code == 0, "by default no GPU sends anything to another"


def test_every_device_computes_its_own_check(monkeypatch, four_cpus, capsys):
    """Other logical ones stand for GPUs."""
    chosen, convolve, devices = tf.device, tf.nn.conv2d, []

    def choose(name):
        return chosen(four_cpus[int(name[-1]) + ("gpu" in name)])

    def noting(*given):
        devices.append((result := convolve(*given)).device[-5:])
        return result

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["GPU"] * 2)
    monkeypatch.setattr(tf, "device", choose)
    monkeypatch.setattr(tf.nn, "conv2d", noting)
    doctor.compute_in_child()
    assert devices == ["CPU:0", "CPU:1", "CPU:2"]
    assert capsys.readouterr().out.splitlines()[1:] == ["/cpu:0", "/gpu:0", "/gpu:1"]


def test_the_present_machine_passes_the_check(capsys):
    code, lines = diagnose(capsys)
    assert "/cpu:0: computes correctly" in lines
    assert code == 0
