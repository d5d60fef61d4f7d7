"""The doctor on made-up machines: no GPU is needed, and none would disturb."""

import dataclasses
import functools
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

import runs
from cifar10.tools.doctor import cuda_libraries, machine, nvidia, probe, report
from cifar10.tools.doctor.advice import advise
from cifar10.tools.doctor.facts import NEW_CUDNN, OLD_CUDNN, Facts
from cifar10.tools.doctor.options import Options
from cifar10.towers import hardware

GPU = nvidia.Gpu("NVIDIA A100", "570.10.01", "81920 MiB", "1024 MiB", "8.0")
ALL_LOADED = tuple(
    cuda_libraries.Library(name, "wheel", f"/site/nvidia/{name}", in_wheel=True)
    for name in cuda_libraries.NEEDED
)
MATMUL, CONVOLUTION = probe.OPERATIONS
WITH_XLA = [(operation, True) for operation in probe.OPERATIONS]
ALWAYS = [(operation, False) for operation in probe.OPERATIONS] + WITH_XLA


def failing(error, where, device="/gpu:0"):
    """All computations of a machine, of which those `where` fail on a device."""
    computations = tuple(
        probe.Computation(on, *kind, error if on == device and kind in where else "")
        for on in ("/cpu:0", "/gpu:0")
        for kind in ALWAYS
    )
    return {"probe__computations": computations}


def seen(*capabilities):
    """GPUs as TensorFlow sees them."""
    devices = enumerate(capabilities)
    return {"probe__gpus": tuple(probe.Device(f"/gpu:{n}", "X", c) for n, c in devices)}


def library(name, **changes):
    """All libraries, of which one is changed."""
    return {
        "libraries": tuple(
            dataclasses.replace(one, **changes) if one.name == name else one
            for one in ALL_LOADED
        )
    }


driver = functools.partial(library, "libcuda.so.1")
cudnn = functools.partial(library, "libcudnn.so.9")


def made_up(gpus=1, **changes):
    """A Linux machine with NVIDIA GPUs on which all is well, but for the changes.

    A change names a part, and an attribute of it, as in `nvidia__smi_error`.
    """
    facts = Facts(
        machine=machine.Machine(
            *("Linux-6", False, False, {"tensorflow": "2.21.0"}),
            hardware.Processor("A processor", 8, 8, hardware.FEATURES),
            hardware.Memory(16 * 10**9, 12 * 10**9),
            (machine.Folder("runs", "/runs", 10**11, True),),
        ),
        ports=machine.Ports(),
        nvidia=nvidia.Nvidia(tuple("abcd"[:gpus]), (GPU,) * gpus),
        libraries=ALL_LOADED,
        probe=probe.Probe("12.5.1", "9", ("6.0", "7.0", "8.0", "8.9", "9.0")),
    )
    for name, value in {**seen(*["8.0"] * gpus), **failing("", ()), **changes}.items():
        part, _, attribute = name.partition("__")
        change = {part: value}
        if attribute:
            whole = getattr(facts, part)
            change[part] = dataclasses.replace(whole, **{attribute: value})
        facts = dataclasses.replace(facts, **change)
    return facts


NO_DRIVER = {**seen(), **driver(error="no such file"), "nvidia__gpus": ()}
NO_CUDNN = {**seen(), **cudnn(error="cannot open", in_wheel=False)}
SHADOWED = {"place": "LD_LIBRARY_PATH", "path": "/old/libcudnn"}
IN_CONTAINER = {"machine__container": True}
FOUR_ON_BUS = {"nvidia__pci": tuple("abcd")}
NO_CONFIGURATION = "Autotuner could not find any supported configs"
STALE = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
NO_NCCL = cuda_libraries.Library("libnccl.so.2", "system", "", error="no such file")
NO_NCCL = {"libraries": (*ALL_LOADED, NO_NCCL)}
# GPUs that TensorFlow does not see, and the driver does.
OLD = {"nvidia__gpus": (dataclasses.replace(GPU, capability="6.1"),)}


def folder(*values):
    return {"machine__folders": (machine.Folder(*values),)}


def port(*, local, error=""):
    return {"ports__ports": (machine.Port("a:1", local, error),)}


def test_each_problem_has_its_advice():
    for changes, finding, fix in (
        # TensorFlow finds no GPU.
        ({**seen(), "probe__cuda": ""}, "0 of 1", "uninstall"),
        (NO_DRIVER, "no such file", "Install driver"),
        (NO_DRIVER | IN_CONTAINER, "driver", "--gpus"),
        ({**seen(), "nvidia__smi_error": STALE}, "communicate", "Secure Boot"),
        (seen() | driver(version="11.4", status=803), "11.4", "driver 555"),
        (seen() | driver(status=100), "100", "CUDA_VISIBLE_DEVICES"),
        (NO_CUDNN, "libcudnn.so.9", "tensorflow[and-cuda]==2.21.*', or"),
        (NO_CUDNN | OLD, "libcudnn.so.9", OLD_CUDNN),
        (seen() | cudnn(error="ELF", **SHADOWED), "ELF", "LD_LIBRARY_PATH"),
        (seen(), "not known", "VLOG_LEVEL"),
        (FOUR_ON_BUS, "1 of 4", ""),
        # A computation fails.
        (seen("12.0") | failing("HANDLE", ALWAYS), "HANDLE", "up to 9.0"),
        (seen("12.0") | failing("PTX", WITH_XLA), "PTX", "without --xla"),
        (failing(NO_CONFIGURATION, WITH_XLA), "configs", NEW_CUDNN),
        (failing("new", ALWAYS), "/gpu:0", "driver 555"),
        # A version does not fit the GPU.
        (seen("9.0") | driver(version="12.4"), "12.4", "driver 555"),
        (seen("7.0") | failing("x", ALWAYS) | cudnn(version="9.28"), "8", OLD_CUDNN),
        (NO_NCCL | port(local=True), "NCCL", "--variable_update"),
        # The rest of the machine.
        ({"machine__memory": hardware.Memory(4, 10**9)}, "1.0 GB", "memory"),
        (folder("runs", "/there", 10**10, False), "/there", "--train_dir"),
        ({"probe": probe.Probe(error="it died of SIGILL")}, "SIGILL", "AVX"),
        (port(local=True, error="in use"), "a:1", "ss -ltnp"),
    ):
        (advice,) = advise(made_up(**changes))
        assert advice.broken, finding
        assert finding in advice.finding
        assert fix in advice.fix, finding


def test_choice_or_a_limit_is_a_note():
    for facts, finding, fix in (
        (made_up(0), "no NVIDIA GPU", ""),
        (made_up(0, **IN_CONTAINER), "no NVIDIA GPU", "--gpus"),
        (made_up(4, **seen("8.0"), nvidia__visible_devices="2"), "1 of 4", "Unset"),
        (made_up(1, **cudnn(version="9.3")), "--xla", NEW_CUDNN),
        (made_up(2, **NO_NCCL), "NCCL", "--variable_update"),
        # The cuDNN that XLA needs has no code for old GPUs.
        (made_up(1, **seen("6.1"), **failing("it", WITH_XLA)), "it", "without --xla"),
    ):
        (advice,) = advise(facts)
        assert not advice.broken, finding
        assert finding in advice.finding
        assert fix in advice.fix, finding


def test_healthy_machine_gets_no_advice():
    for changes in (
        {},
        cudnn(**SHADOWED),  # All works with it.
        FOUR_ON_BUS | IN_CONTAINER,  # The bus has the GPUs of the host.
        seen("8.9") | driver(version="12.4"),
        seen("7.5") | cudnn(version="9.28"),
        seen("6.0") | cudnn(version="9.10"),
        NO_NCCL,
    ):
        assert advise(made_up(**changes)) == ()


def test_advice_names_the_cudnn_of_the_extras():
    text = (runs.ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert NEW_CUDNN in extras["gpu"]
    assert OLD_CUDNN in extras["gpu-old"]


# What is found out.


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_gpus_are_found_on_the_bus_and_by_nvidia_smi(tmp_path, monkeypatch):
    device = tmp_path / "sys/bus/pci/devices/0000:00:00.0"
    write(device / "vendor", "0x10de\n")
    write(device / "class", "0x030200\n")
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    found = nvidia.examine()
    assert found.pci == ("0000:00:00.0",)
    assert found.smi_error
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    row = "NVIDIA H200, 570.1, 143771 MiB, 5 MiB, 9.0"
    for script, gpus, error in (
        (f"echo '{row}'", (nvidia.Gpu(*row.split(", ")),), ""),
        ("exit 3", (), "exit code 3"),
    ):
        write(tmp_path / "nvidia-smi", f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        found = nvidia.examine()
        assert (found.gpus, found.smi_error) == (gpus, error)


def test_library_that_fails_or_hides_a_wheel_is_known(tmp_path, monkeypatch):
    """Of two wheels, one library is good and one damaged."""
    places = map(Path, ("/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/lib"))
    good = next(path for path in places if (path / "libm.so.6").exists())
    runtime = tmp_path / "site/nvidia/cuda_runtime/lib"
    runtime.mkdir(parents=True)
    (runtime / "libcudart.so.12").symlink_to(good / "libm.so.6")
    write(tmp_path / "site/nvidia/cudnn/lib/libcudnn.so.9", "not a library")
    write(tmp_path / "site/tensorflow/__init__.py", "")
    write(tmp_path / "system/libcudart.so.12", "an old one")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "tensorflow")

    def examine(path):
        monkeypatch.setenv("LD_LIBRARY_PATH", path)
        found = {one.name: one for one in cuda_libraries.examine()}
        return found, [name for name, one in found.items() if one.shadows_wheel]

    found, hiding = examine(str(runtime))
    assert not hiding, "the wheels' own folder hides nothing"
    assert not found["libcudart.so.12"].error
    assert found["libcudart.so.12"].place == "wheel"
    assert found["libcudnn.so.9"].error
    found, hiding = examine(f"/nowhere:{tmp_path / 'system'}")
    assert hiding == ["libcudart.so.12"]
    assert found["libcudart.so.12"].error


CGROUP = {
    "proc/self/cgroup": "0::/pod/me\n",
    "sys/fs/cgroup/pod/me/memory.max": "max\n",
    "sys/fs/cgroup/pod/memory.max": "3000000000\n",
    "sys/fs/cgroup/pod/memory.current": "1000000000\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 8\ninactive_file 400000000\n",
    "sys/fs/cgroup/pod/me/cpu.max": "50000 100000\n",
}


def test_limits_of_a_container_count(tmp_path, monkeypatch):
    write(tmp_path / "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    write(tmp_path / "run/.containerenv", "")
    for name, text in CGROUP.items():
        write(tmp_path / name, text)
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    found = machine.examine({"a": f"{tmp_path}/a/b", "b": f"{tmp_path}/proc/meminfo/x"})
    assert found.container
    # Files that are only kept for a next reading make room.
    assert found.memory == hardware.Memory(3 * 10**9, 24 * 10**8)
    assert found.processor.usable == 0.5
    assert [folder.writable for folder in found.folders[:2]] == [True, False]


CHILD = """
import json, os, sys, time

def main():
    finished = int(sys.argv[2])
    def say(what):
        print(json.dumps(what), flush=True)
    sys.stderr.write("W0000 cuda is old\\nF0000 Check failed: ptx\\n*** stack ***\\n")
    sys.stderr.flush()
    gpu = {"name": "/gpu:0", "model": "X", "capability": "8.0"}
    say({"cuda": "12", "cudnn": "9", "built_for": ["6.0"], "gpus": [gpu]})
    operations = {"good": int, "abort": os.abort, "exit": lambda: os._exit(3),
                  "hang": lambda: time.sleep(60), "last": int}
    for operation in list(operations)[finished:]:
        computation = {"device": "/gpu:0", "operation": operation, "xla": False}
        say({**computation, "error": "not finished"})
        operations[operation]()
        say({**computation, "ms": 1.0})
"""


@pytest.mark.slow
def test_process_that_dies_costs_one_computation(tmp_path, monkeypatch):
    write(tmp_path / "dying.py", CHILD)
    write(tmp_path / "broken.py", "def main():\n    raise ImportError('libx.so')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tried = probe.run(2.0, module="dying")
    good, abort, ended, hung, last = [one.error for one in tried.computations]
    assert good == last == tried.error == ""
    assert "SIGABRT: F0000 Check failed: ptx" in abort
    assert "code 3" in ended
    assert "no answer" in hung
    assert tried.gpus[0].capability == "8.0"
    assert tried.message == "W0000 cuda is old"
    assert "libx.so" in probe.run(2.0, module="broken").error


# What is said of it.


@pytest.fixture
def on(monkeypatch):
    """Runs the report on a made-up machine."""

    def report_on(facts, **options):
        monkeypatch.setattr(machine, "examine", lambda _: facts.machine)
        monkeypatch.setattr(machine, "examine_ports", lambda: facts.ports)
        monkeypatch.setattr(nvidia, "examine", lambda: facts.nvidia)
        monkeypatch.setattr(cuda_libraries, "examine", lambda: facts.libraries)
        monkeypatch.setattr(probe, "run", lambda *_, **__: facts.probe)
        monkeypatch.setattr(probe, "look", lambda: facts.probe)
        return report.run(Options(**options))

    return report_on


def test_report_ends_with_the_fix(on, capsys):
    assert on(made_up(1)) == 0
    assert "PROBLEM" not in capsys.readouterr().out
    assert on(made_up(1, **NO_CUDNN)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PROBLEM")
    assert "pip install" in last
    assert on(made_up(1, **NO_DRIVER), json=True) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["ok"], content["nvidia"]["pci"]) == (False, ["a"])
    assert content["advice"][0]["broken"]


def test_training_says_only_why_gpus_are_missing(on):
    on(made_up(2, **NO_DRIVER, machine__memory=hardware.Memory(1, 1)))
    (line,) = report.explain_missing_gpus().splitlines()
    assert "0 of 2" in line
    for gpus in (0, 2):
        on(made_up(gpus))
        assert report.explain_missing_gpus() == ""


@pytest.mark.slow
def test_processor_of_this_machine_computes(tmp_path):
    words = ("doctor", "--json", "--train_dir", tmp_path)
    done = runs.run("-m", "cifar10", *words, env={"TF_CONFIG": "garbage"})
    content = json.loads(done.stdout)
    tried = content["probe"]["computations"]
    assert [one["error"] for one in tried if one["device"] == "/cpu:0"] == [""] * 4
    assert "garbage" in content["ports"]["error"]
    assert (done.returncode, done.stderr) == (1, "")
