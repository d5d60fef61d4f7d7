"""The doctor on made-up machines: no GPU is needed, and none would disturb."""

import argparse
import copy
import json
import shutil
import subprocess
import tomllib

import pytest

import runs
from cifar10.tools import doctor
from cifar10.tools.doctor import NEW_CUDNN, OLD_CUDNN

ABSENT = {"absent": "cannot open libcuda"}
NONE_FOUND = {"TensorFlow": {"gpus": 0}}


def seen(*capabilities):
    """GPUs that the driver and TensorFlow see."""
    return {
        "driver": {"capabilities": [[*capability] for capability in capabilities]},
        "TensorFlow": {"gpus": len(capabilities)},
    }


OLD, TWO = seen((6, 1)), seen((8, 0), (8, 0))


def machine(*changes):
    """Facts about a machine with an NVIDIA GPU on which all is well, but for these."""
    facts = {
        "memory": {"free GB": 12.0},
        "runs": {"path": "/runs", "free GB": 99.0},
        "driver": {"CUDA": "12.8", "capabilities": [[8, 0]]},
        "CUDA libraries": {"cuDNN": [9, 24]},
        "NCCL": {"loaded": True},
        "libdevice": {"path": "/usr/local/cuda/nvvm/libdevice/libdevice.10.bc"},
        "TensorFlow": {"version": "2.21.0", "has_cuda": True, "gpus": 1},
        "/cpu:0": {"result": "right"},
        "/gpu:0": {"result": "right"},
    }
    for change in changes:
        for name, fact in copy.deepcopy(change).items():
            facts[name] = {**facts[name], **fact}
    return facts


def broken_driver(error):
    """Facts about a machine whose driver does not start, or stalls."""
    facts = machine(NONE_FOUND)
    del facts["CUDA libraries"], facts["NCCL"], facts["libdevice"], facts["/gpu:0"]
    return {**facts, "driver": error}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def failing(name, error="x"):
    return {name: {"error": error}}


@pytest.mark.parametrize(
    ("changes", "finding", "fix"),
    [
        # TensorFlow finds no GPU.
        (
            [NONE_FOUND, {"TensorFlow": {"has_cuda": False}}],
            "without CUDA",
            "uninstall",
        ),
        ([NONE_FOUND, failing("CUDA libraries", "libcudnn")], "libcudnn", "[and-cuda]"),
        ([OLD, NONE_FOUND, failing("CUDA libraries")], "CUDA libraries", OLD_CUDNN),
        ([NONE_FOUND], "0 of 1", "VLOG_LEVEL"),
        # What it finds does not work.
        ([seen((9, 0)), failing("driver", "CUDA 12.4")], "12.4", "Install NVIDIA's"),
        ([failing("/gpu:0", "HANDLE")], "HANDLE", "[and-cuda]"),
        ([seen((12, 0)), failing("/gpu:0", "PTX")], "PTX", "above 9.0"),
        ([OLD, failing("/gpu:0")], "/gpu:0", OLD_CUDNN),
        # The rest of the machine.
        ([failing("memory", "1.0 GB")], "1.0 GB", "memory"),
        ([failing("runs", "not writable")], "writable", "--train_dir"),
        ([failing("TensorFlow", "died of SIGILL")], "SIGILL", "AVX"),
    ],
)
def test_each_problem_has_its_fix(changes, finding, fix):
    advice = [*doctor.advise(machine(*changes))]
    assert [one for one in advice if one.broken and finding in one.finding]
    assert any(fix in one.fix for one in advice), advice


@pytest.mark.parametrize(
    "error",
    [
        {"CUDA": "12.8", "error": "error 802: not yet initialized"},
        {"error": "no answer within 60 s", "unfinished": True},
    ],
)
def test_driver_that_does_not_start_is_a_problem(error):
    (advice,) = doctor.advise(broken_driver(error))
    assert advice.broken
    assert error["error"] in advice.finding
    assert "Restart" in advice.fix
    assert "fabricmanager" in advice.fix


@pytest.mark.parametrize(
    ("changes", "finding", "fix"),
    [
        ([TWO, failing("NCCL", "libnccl")], "libnccl", "[and-cuda]"),
        ([failing("libdevice", "no libdevice.10.bc")], ".bc", "without --xla"),
        ([{"CUDA libraries": {"cuDNN": [9, 10]}}], "cuDNN", NEW_CUDNN),
        ([OLD, {"CUDA libraries": {"cuDNN": [9, 10]}}], "cuDNN", "without --xla"),
    ],
)
def test_choice_or_a_limit_is_a_note(changes, finding, fix):
    (advice,) = doctor.advise(machine(*changes))
    assert not advice.broken
    assert finding in advice.finding
    assert fix in advice.fix
    # Nobody can have both on an old GPU.
    assert NEW_CUDNN not in advice.fix or OLD not in changes


def test_machine_without_a_gpu_or_driver_gets_a_note():
    (advice,) = doctor.advise(broken_driver(ABSENT))
    assert not advice.broken
    assert "no NVIDIA GPU" in advice.finding
    assert "--gpus all" in advice.fix


def test_hidden_gpus_and_other_libraries_first_are_told(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (advice,) = doctor.advise(machine(TWO, {"TensorFlow": {"gpus": 1}}))
    assert not advice.broken
    assert "1 of 2" in advice.finding
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/old")
    advice = doctor.advise(machine(NONE_FOUND, failing("CUDA libraries")))
    assert any("/opt/old" in one.fix for one in advice)


@pytest.mark.parametrize(
    "changes",
    [[], [OLD], [failing("NCCL")]],  # One GPU does not need NCCL.
)
def test_healthy_machine_gets_no_advice(changes):
    assert [*doctor.advise(machine(*changes))] == []


def test_advice_names_the_cudnn_of_the_extras():
    text = (runs.ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert NEW_CUDNN in extras["gpu"]
    assert OLD_CUDNN in extras["gpu-old"]


# What is found out.


# NVIDIA's driver, as it describes itself to programs.
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) {
  char *fault = getenv("FAULT");
  if (!fault) return 0;
  if (!strcmp(fault, "hangs")) sleep(1000);
  if (!strcmp(fault, "dies")) { write(2, "fatal: broken\n", 14); abort(); }
  return atoi(fault);
}
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "not yet"; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? atoi(getenv("MAJOR")) : attribute == 76 ? 0 : -1;
  return 0;
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts a driver of CUDA 12.4 with two GPUs where programs find it."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    words = ["-w", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run([compiler, *words], cwd=tmp_path, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("MAJOR", "8")
    found = {"version": "2.21.0", "has_cuda": True, "gpus": 0}
    monkeypatch.setattr(doctor, "describe_tensorflow", lambda: found)
    return found


@pytest.mark.parametrize(
    ("fault", "major", "finding"),
    [
        (None, "8", "0 of 2"),
        (None, "9", "CUDA 12.4"),
        ("802", "8", "not yet"),
        ("dies", "8", "fatal: broken"),
        ("hangs", "8", "no answer within 3 s"),
    ],
)
def test_training_is_told_why_gpus_are_missing(
    driver, fault, major, finding, monkeypatch
):
    del driver
    monkeypatch.setattr(doctor, "_DRIVER_SECONDS", 3.0)
    monkeypatch.setenv("MAJOR", major)
    if fault:
        monkeypatch.setenv("FAULT", fault)
    assert finding in doctor.explain_missing_gpus()


def test_a_missing_file_of_xlas_is_named(driver, tmp_path, monkeypatch):
    del driver
    monkeypatch.setattr(doctor, "_CUDA_ROOTS", ())
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path}")
    said = doctor.explain_missing_gpus()
    assert f"libdevice.10.bc in {tmp_path}" in said
    (tmp_path / "nvvm/libdevice").mkdir(parents=True)
    (tmp_path / "nvvm/libdevice/libdevice.10.bc").touch()
    assert "libdevice" not in doctor.explain_missing_gpus()


def test_driver_without_a_library_of_its_own_is_broken(driver, tmp_path):
    driver["gpus"] = 0
    (tmp_path / "part.c").write_text("int part;")
    compiler, shared = shutil.which("cc"), ["-shared", "-fPIC"]
    for words in (
        ["-o", "libpart.so", "part.c"],
        ["-o", "libcuda.so.1", "part.c", "-Wl,--no-as-needed", "libpart.so"],
    ):
        subprocess.run([compiler, *shared, *words], cwd=tmp_path, check=True)
    (tmp_path / "libpart.so").unlink()
    said = doctor.explain_missing_gpus()
    assert said.startswith("PROBLEM: driver: libpart.so")


def test_training_that_asks_for_a_gpu_is_told_of_a_missing_driver(monkeypatch):
    absent = {doctor.DRIVER: {"absent": "libcuda.so.1: no such file"}}
    monkeypatch.setattr(doctor, "_examine_driver", lambda: absent)
    said = doctor.explain_missing_gpus()
    assert said.startswith("NOTE: There is no NVIDIA GPU")
    assert "Install NVIDIA's driver" in said


def test_training_that_has_all_gpus_is_told_nothing(driver):
    driver["gpus"] = 2
    assert doctor.explain_missing_gpus() == ""


def test_a_wheels_library_is_loaded_after_those_of_the_path(tmp_path, monkeypatch):
    """Its error shows which file it was."""
    for place in ("nvidia/cudnn/lib", "path"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "libcuda.so.1").write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    found = {"version": "2.21.0", "has_cuda": True, "gpus": 0}
    monkeypatch.setattr(doctor, "describe_tensorflow", lambda: found)
    assert "nvidia/cudnn/lib" in doctor.explain_missing_gpus()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/path")
    assert f"{tmp_path}/path" in doctor.explain_missing_gpus()


def test_machine_is_examined_as_it_is(tmp_path, monkeypatch, capsys):
    """Also where a run's folder cannot be written, and memory is short."""
    monkeypatch.setattr(doctor.hardware, "available_memory", lambda: 10**9)
    (tmp_path / "file").touch()
    words = ["--train_dir", str(tmp_path / "file/run"), "--json"]
    assert doctor.main(argparse.ArgumentParser(), words) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["ok"]
    assert said["facts"]["/cpu:0"] == {"result": "right"}
    problems = [piece["finding"] for piece in said["advice"] if piece["broken"]]
    assert "1.0 GB" in problems[0]
    assert "not writable" in problems[1]
