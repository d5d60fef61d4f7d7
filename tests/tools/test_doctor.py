"""The doctor on made-up machines: no GPU is needed, and none would disturb."""

import copy
import os
import tomllib

import pytest

import runs
from cifar10.tools import doctor, doctor_probe
from cifar10.tools.doctor import NEW_CUDNN, OLD_CUDNN
from cifar10.towers import hardware

LIBRARIES = ("libcudart.so.12", "libcudnn.so.9", "libnccl.so.2")
DRIVER = "libcuda.so.1"
MISSING = {"error": "cannot open shared object file"}
STALLED = {"error": "no answer", "unfinished": True}
NONE_FOUND = {"TensorFlow": {"gpus": 0}}
NO_DRIVER = {DRIVER: MISSING, "nvidia-smi": {"gpus": []}, "PCI bus": {"gpus": 1}}


def gpu(capability):
    return f"NVIDIA X, 570.1, 81920 MiB, 5 MiB, {capability}"


def seen(*capabilities):
    """GPUs that the driver and TensorFlow see."""
    return {
        "nvidia-smi": {"gpus": [gpu(capability) for capability in capabilities]},
        "TensorFlow": {"gpus": len(capabilities)},
    }


OLD, TWO = seen("6.1"), seen("8.0", "8.0")


def machine(*changes):
    """Facts about a machine with an NVIDIA GPU on which all is well, but for these."""
    facts = {
        "memory": {"GB": 16.0, "free GB": 12.0},
        "runs": {"path": "/runs", "free GB": 99.0, "writable": True},
        "data set": {"path": "/data", "free GB": 99.0, "writable": True},
        "temporary files": {"path": "/tmp", "free GB": 99.0, "writable": True},  # noqa: S108
        "TF_CONFIG": {"workers": 1},
        "PCI bus": {"gpus": 1},
        "nvidia-smi": {"gpus": [gpu("8.0")]},
        DRIVER: {"version": "12.8"},
        **{name: {"loaded": True} for name in LIBRARIES},
        "TensorFlow": {"version": "2.21.0", "has_cuda": True, "gpus": 1},
    }
    for name in ("/cpu:0", "/gpu:0", "/cpu:0 with XLA", "/gpu:0 with XLA"):
        facts[name] = {"ms": 5}
    for change in changes:
        for name, fact in copy.deepcopy(change).items():
            facts[name] = {**facts[name], **fact}
    return facts


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def failing(name, error="x"):
    return {name: {"error": error}}


def without_gpus():
    return [NONE_FOUND, {"nvidia-smi": {"gpus": []}, "PCI bus": {"gpus": 0}}]


@pytest.mark.parametrize(
    ("changes", "finding", "fix"),
    [
        # TensorFlow finds no GPU.
        (
            [NONE_FOUND, {"TensorFlow": {"has_cuda": False}}],
            "without CUDA",
            "uninstall",
        ),
        ([NONE_FOUND, NO_DRIVER], "cannot open", "Install NVIDIA's driver"),
        ([NONE_FOUND, failing("nvidia-smi", "communicate")], "communicate", "driver"),
        ([NONE_FOUND, {"nvidia-smi": STALLED}], "no answer", "Restart the machine"),
        ([NONE_FOUND, failing(DRIVER, "error 802")], "802", "fabricmanager"),
        ([NONE_FOUND, {DRIVER: {"version": "11.4"}}], "11.4", "driver 555"),
        ([NONE_FOUND, failing("libcudnn.so.9")], "libcudnn.so.9", "[and-cuda]==2.21.0"),
        ([OLD, NONE_FOUND, failing("libcudnn.so.9")], "libcudnn", OLD_CUDNN),
        ([NONE_FOUND], "0 of 1", "VLOG_LEVEL"),
        # What it finds does not work.
        ([seen("9.0"), {DRIVER: {"version": "12.4"}}], "12.4", "driver 555"),
        ([failing("/gpu:0", "HANDLE")], "HANDLE", "[and-cuda]==2.21.0"),
        ([seen("12.0"), failing("/gpu:0", "PTX")], "PTX", "above 9.0"),
        ([OLD, failing("/gpu:0")], "/gpu:0", OLD_CUDNN),
        # The rest of the machine.
        ([{"memory": {"free GB": 1.0}}], "1.0 GB", "memory"),
        ([{"runs": {"writable": False}}], "/runs", "--train_dir"),
        ([{"data set": {"free GB": 0.1}}], "/data", "--data_dir"),
        ([failing("TensorFlow", "died of SIGILL")], "SIGILL", "AVX"),
        ([failing("TF_CONFIG", "port 1 is in use")], "port 1", "unset TF_CONFIG"),
    ],
)
def test_each_problem_has_its_fix(changes, finding, fix):
    advice = [*doctor.advise(machine(*changes))]
    assert [one for one in advice if one.broken and finding in one.finding]
    assert any(fix in one.fix for one in advice), advice


@pytest.mark.parametrize(
    ("changes", "finding", "fix"),
    [
        (without_gpus(), "no NVIDIA GPU", "--gpus all"),
        ([TWO, failing("libnccl.so.2")], "libnccl", "[and-cuda]"),
        ([failing("/gpu:0 with XLA", "configs")], "configs", NEW_CUDNN),
        ([OLD, failing("/gpu:0 with XLA", "configs")], "configs", "without --xla"),
    ],
)
def test_choice_or_a_limit_is_a_note(changes, finding, fix):
    (advice,) = doctor.advise(machine(*changes))
    assert not advice.broken
    assert finding in advice.finding
    assert fix in advice.fix
    # Nobody can have both on an old GPU.
    assert NEW_CUDNN not in advice.fix or OLD not in changes


def test_hidden_gpus_and_other_libraries_first_are_told(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (advice,) = doctor.advise(machine(TWO, {"TensorFlow": {"gpus": 1}}))
    assert not advice.broken
    assert "1 of 2" in advice.finding
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/old")
    *_, advice = doctor.advise(machine(NONE_FOUND, failing("libcudnn.so.9")))
    assert "/opt/old" in advice.fix


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [{"PCI bus": {"gpus": 4}}],  # In a container it has the GPUs of the host.
        [seen("8.9"), {DRIVER: {"version": "12.4"}}],
        [OLD],
        [failing("libnccl.so.2")],  # One GPU does not need it.
        [{"data set": {"writable": False}}],
    ],
)
def test_healthy_machine_gets_no_advice(changes):
    assert [*doctor.advise(machine(*changes))] == []


def test_advice_names_the_cudnn_of_the_extras():
    text = (runs.ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert NEW_CUDNN in extras["gpu"]
    assert OLD_CUDNN in extras["gpu-old"]


# What is found out.


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi on the PATH of a machine whose PCI bus has an NVIDIA GPU."""
    device = tmp_path / "sys/bus/pci/devices/0000:00:00.0"
    write(device / "vendor", "0x10de\n")
    write(device / "class", "0x030200\n")
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")

    def put(script):
        write(tmp_path / "nvidia-smi", f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("script", "finding"),
    [
        (f"echo '{gpu('9.0')}'; echo '{gpu('9.0')}'", "0 of 2"),
        ("echo it is broken; exit 9", "it is broken"),
        ("echo No devices were found", "No devices were found"),
        ("sleep 1000", "no answer within 3 s"),
    ],
)
def test_training_is_told_why_gpus_are_missing(smi, script, finding, monkeypatch):
    monkeypatch.setattr(doctor, "_DRIVER_SECONDS", 3.0)
    found = {"version": "2.21.0", "has_cuda": True, "gpus": 0}
    monkeypatch.setattr(doctor_probe, "describe_tensorflow", lambda: found)
    smi(script)
    said = doctor.explain_missing_gpus()
    assert finding in said
    found["gpus"] = 2
    assert doctor.explain_missing_gpus() == ""


def test_a_wheels_library_is_loaded_after_those_of_the_path(tmp_path, smi, monkeypatch):
    """Its error shows which file it was."""
    for place in ("nvidia/cudnn/lib", "path"):
        write(tmp_path / place / "libcuda.so.1", f"in {place}, no library")
    monkeypatch.syspath_prepend(tmp_path)
    smi("exit 1")
    found = {"version": "2.21.0", "has_cuda": True, "gpus": 0}
    monkeypatch.setattr(doctor_probe, "describe_tensorflow", lambda: found)
    facts = doctor._examine_nvidia()
    assert "nvidia/cudnn/lib" in facts[DRIVER]["error"]
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/path")
    assert f"{tmp_path}/path" in doctor._examine_nvidia()[DRIVER]["error"]
