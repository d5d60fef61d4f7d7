"""The doctor on made-up machines: no GPU is needed, and none would disturb."""

import dataclasses
import json
import os
import platform
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cifar10.tools import child_process
from cifar10.tools.doctor import (
    cuda_libraries,
    machine,
    missing_gpus,
    nvidia,
    probe,
    report,
)
from cifar10.tools.doctor.advice import advise
from cifar10.tools.doctor.facts import NEW_CUDNN, OLD_CUDNN, Facts, numbers
from cifar10.tools.doctor.options import Options
from cifar10.towers import hardware

REPOSITORY = Path(__file__).parents[2]

GPU = nvidia.Gpu("NVIDIA A100", "570.10.01", "81920 MiB", "1024 MiB", "8.0")
ALL_LOADED = tuple(
    cuda_libraries.Library(name, "wheel", f"/site/nvidia/{name}", in_wheel=True)
    for name in cuda_libraries.NEEDED
)
OPERATIONS = [(op, xla) for xla in (False, True) for op in probe.OPERATIONS]


def computed(device, errors=()):
    """All computations of a device; `errors` by (operation, xla)."""
    errors = dict(errors)
    return tuple(
        probe.Computation(device, operation, xla, errors.get((operation, xla), ""))
        for operation, xla in OPERATIONS
    )


def seen(*capabilities):
    return tuple(
        probe.Device(f"/gpu:{number}", "NVIDIA", capability)
        for number, capability in enumerate(capabilities)
    )


def made_up(gpus=1, **changes):
    """A Linux machine with NVIDIA GPUs on which all is well, but for the changes.

    A change names a part, and an attribute of it, as in `nvidia__smi_error`.
    """
    facts = Facts(
        machine=machine.Machine(
            platform="Linux-6",
            wsl=False,
            container=False,
            versions={"tensorflow": "2.21.0"},
            processor=hardware.Processor("A processor", 8, 8, hardware.FEATURES),
            memory=hardware.Memory(16 * 10**9, 12 * 10**9),
            folders=(machine.Folder("runs", "/runs", 10**11, True),),
        ),
        ports=machine.Ports(),
        nvidia=nvidia.Nvidia(
            pci=tuple(f"0000:0{number}:00.0" for number in range(gpus)),
            gpus=(GPU,) * gpus,
        ),
        libraries=ALL_LOADED,
        probe=probe.Probe(
            cuda="12.5.1",
            cudnn="9",
            built_for=("6.0", "7.0", "8.0", "8.9", "9.0"),
            gpus=seen(*["8.0"] * gpus),
            computations=sum(
                (computed(f"/gpu:{number}") for number in range(gpus)),
                computed("/cpu:0"),
            ),
        ),
    )
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        change = {attribute: value}
        whole = (
            dataclasses.replace(getattr(facts, part), **change) if attribute else value
        )
        facts = dataclasses.replace(facts, **{part: whole})
    return facts


def with_library(name, **changes):
    """All libraries, of which one is changed."""
    return tuple(
        dataclasses.replace(library, **changes) if library.name == name else library
        for library in ALL_LOADED
    )


NOT_THERE = "libcudnn.so.9: cannot open shared object file"
NO_GPU_SEEN = {"probe__gpus": ()}
NO_DRIVER = {
    **NO_GPU_SEEN,
    "nvidia__gpus": (),
    "nvidia__smi_error": "not installed",
    "libraries": with_library("libcuda.so.1", error="no such file"),
}


@pytest.mark.parametrize("gpus", [1, 4])
def test_of_a_healthy_machine_nothing_is_said(gpus):
    assert advise(made_up(gpus)) == ()


def test_a_machine_without_a_gpu_is_not_broken():
    (advice,) = advise(made_up(0))
    assert not advice.broken
    assert "no NVIDIA GPU" in str(advice)
    assert "--gpus all" not in str(advice)
    for place, fix in [("container", "--gpus all"), ("wsl", "driver in Windows")]:
        (advice,) = advise(made_up(0, **{f"machine__{place}": True}))
        assert fix in advice.fix


@pytest.mark.parametrize(
    ("changes", "finding", "fix"),
    [
        ({"probe__cuda": ""}, "built without CUDA", "pip uninstall"),
        (NO_DRIVER, "driver cannot be used: no such file", "Install driver 555"),
        ({**NO_DRIVER, "machine__container": True}, "cannot be used", "--gpus all"),
        (
            {
                "libraries": with_library("libcuda.so.1", error="no such file"),
                "machine__container": True,
            },
            "driver cannot be used",
            "NVIDIA_DRIVER_CAPABILITIES=compute",
        ),
        (
            {
                "libraries": with_library("libcuda.so.1", error="no such file"),
                "machine__wsl": True,
            },
            "driver cannot be used",
            "none in WSL",
        ),
        (
            {
                "nvidia__gpus": (),
                "nvidia__smi_error": "NVIDIA-SMI has failed because it couldn't "
                "communicate with the NVIDIA driver.",
            },
            "driver cannot be used: NVIDIA-SMI has failed",
            "Secure Boot",
        ),
        (
            {
                "nvidia__gpus": (),
                "nvidia__smi_error": "Failed to initialize NVML: Insufficient "
                "Permissions",
            },
            "this user may not use them",
            "video",
        ),
        (
            {"libraries": with_library("libcuda.so.1", version="11.4", status=803)},
            "runs CUDA 11.4 at most",
            "driver 555",
        ),
        (
            {"libraries": with_library("libcuda.so.1", version="12.4", status=100)},
            "error 100: no GPU is found",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {"libraries": with_library("libcuda.so.1", status=802)},
            "error 802",
            "fabricmanager",
        ),
        (
            {"libraries": with_library("libcuda.so.1", status=803)},
            "error 803",
            "Restart the machine",
        ),
        (
            {"libraries": with_library("libcuda.so.1", status=804)},
            "error 804: cuda-compat",
            "Remove it from LD_LIBRARY_PATH",
        ),
        (
            {"libraries": with_library("libcuda.so.1", status=999)},
            "error 999",
            "nvidia-uvm",
        ),
        ({"libraries": with_library("libcuda.so.1", status=46)}, "error 46", "Restart"),
        (
            {
                "libraries": with_library(
                    "libcudnn.so.9", error=NOT_THERE, in_wheel=False
                )
            },
            "libcudnn.so.9 (libcudnn.so.9: cannot open",
            "tensorflow[and-cuda]==2.21.*', or",
        ),
        (
            {"libraries": with_library("libcudnn.so.9", error="file too short")},
            "file too short",
            "--force-reinstall",
        ),
        (
            {
                "libraries": with_library(
                    "libcudnn.so.9",
                    error="/usr/local/cuda/lib64/libcudnn.so.9: wrong ELF class",
                    place="LD_LIBRARY_PATH",
                    path="/usr/local/cuda/lib64/libcudnn.so.9",
                )
            },
            "libcudnn.so.9 (/usr/local/cuda/lib64/libcudnn.so.9: wrong ELF class)",
            "LD_LIBRARY_PATH puts other files before the wheels",
        ),
        (
            {"probe__message": "Could not load dynamic library"},
            "TensorFlow says: Could not load dynamic library",
            "TF_CPP_MAX_VLOG_LEVEL=3",
        ),
    ],
)
def test_each_cause_of_a_missing_gpu_has_its_advice(changes, finding, fix):
    (advice,) = advise(made_up(1, **{**NO_GPU_SEEN, **changes}))
    assert advice.broken
    assert finding in advice.finding
    assert "finds 0 of 1 NVIDIA GPUs" in advice.finding
    assert fix in advice.fix


def test_every_cause_but_the_last_needs_its_sign():
    (advice,) = missing_gpus._causes(made_up(1, **NO_GPU_SEEN))
    assert "not known" in advice.finding


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_hidden_on_purpose_are_a_note(value):
    facts = made_up(2, **NO_GPU_SEEN, nvidia__visible_devices=value)
    (advice,) = advise(facts)
    assert not advice.broken
    assert f"CUDA_VISIBLE_DEVICES={value} hides" in advice.finding
    assert str(advice).startswith("NOTE: ")


def test_some_gpus_hidden_on_purpose_are_a_note():
    facts = made_up(4, probe__gpus=seen("8.0"), nvidia__visible_devices="2")
    (advice,) = advise(facts)
    assert not advice.broken
    assert "finds 1 of 4" in advice.finding


def test_a_gpu_that_fell_off_the_bus_is_missed_but_not_in_a_container():
    changes = {"nvidia__pci": ("a", "b", "c", "d")}
    (advice,) = advise(made_up(1, **changes))
    assert "finds 1 of 4" in advice.finding
    assert advise(made_up(1, **changes, machine__container=True)) == ()
    # Nor where the container lacks nvidia-smi.
    changes |= {"nvidia__gpus": (), "machine__container": True}
    assert advise(made_up(1, **changes)) == ()


MATMUL, CONVOLUTION = probe.OPERATIONS
ALWAYS = [(operation, xla) for operation, xla in OPERATIONS]
PLAIN_AND_XLA = [(MATMUL, False), (MATMUL, True)]
XLA_ONLY = [(MATMUL, True), (CONVOLUTION, True)]


@pytest.mark.parametrize(
    ("capability", "error", "where", "finding", "fix"),
    [
        ("12.0", "CUDA_ERROR_INVALID_HANDLE", ALWAYS, "INVALID", "up to 9.0"),
        (
            "12.0",
            "LLVM ERROR: PTX version 8.5 does not support target 'sm_120'",
            XLA_ONLY,
            "with XLA",
            "Train without --xla",
        ),
        (
            "8.0",
            "RESOURCE_EXHAUSTED: failed",
            PLAIN_AND_XLA,
            "failed",
            "memory: nvidia-smi",
        ),
        ("8.0", "DNN library initialization failed", ALWAYS, "DNN", "whose cuDNN"),
        ("8.0", "no answer within 5 s", ALWAYS, "no answer", "--seconds"),
        ("8.0", "something new", XLA_ONLY, "with XLA", "Train without --xla"),
        (
            "8.0",
            "INTERNAL: Autotuner could not find any supported configs for HLO",
            XLA_ONLY,
            "with XLA",
            "nvidia-cudnn-cu12>=9.24",
        ),
        ("8.0", "something new", PLAIN_AND_XLA, "plain", "Install driver 555"),
    ],
)
def test_each_cause_of_a_failed_computation_has_its_advice(
    capability, error, where, finding, fix
):
    failed = computed("/gpu:0", dict.fromkeys(where, error))
    facts = made_up(
        1, probe__gpus=seen(capability), probe__computations=computed("/cpu:0") + failed
    )
    (advice,) = advise(facts)
    assert advice.broken
    assert "on /gpu:0 fails" in advice.finding
    assert finding in advice.finding
    assert fix in advice.fix


SHADOWED = with_library("libcudnn.so.9", place="LD_LIBRARY_PATH", path="/old/libcudnn")


def test_a_failed_computation_is_laid_to_a_library_that_hides_the_right_one():
    failed = computed("/gpu:0", dict.fromkeys(ALWAYS, "CUDNN_STATUS_NOT_INITIALIZED"))
    facts = made_up(1, libraries=SHADOWED, probe__computations=failed)
    (advice,) = advise(facts)
    assert "CUDNN_STATUS_NOT_INITIALIZED" in advice.finding
    assert "unset it" in advice.fix
    assert "/old/libcudnn" in advice.fix


def test_a_library_before_the_right_one_is_no_problem_where_all_works():
    assert advise(made_up(1, libraries=SHADOWED)) == ()


def test_a_failure_on_the_processor_is_not_laid_to_a_gpu():
    failed = computed("/cpu:0", {(MATMUL, False): "the process died of SIGILL"})
    (advice,) = advise(made_up(1, probe__computations=failed))
    assert "on /cpu:0 fails" in advice.finding
    assert "driver" not in advice.fix


@pytest.mark.parametrize(
    ("changes", "finding", "fix"),
    [
        ({"machine__memory": hardware.Memory(4, 10**9)}, "Only 1.0 GB of mem", "End"),
        (
            {"machine__folders": (machine.Folder("runs", "/r", 10, True),)},
            "Only 0.00 GB are free in /r, for runs",
            "--train_dir",
        ),
        (
            {"machine__folders": (machine.Folder("runs", "/r", 10**10, False),)},
            "/r, for runs, cannot be written to",
            "--train_dir",
        ),
        (
            {"probe": probe.Probe(error="it died of SIGSEGV")},
            "does not start: it died of SIGSEGV",
            "--force-reinstall",
        ),
        (
            {"probe": probe.Probe(error="it died of SIGILL")},
            "does not start: it died of SIGILL",
            "no AVX: use another machine",
        ),
        ({"ports__error": "it is not JSON"}, "TF_CONFIG cannot be used", "unset"),
        (
            {"ports__ports": (machine.Port("a:1", True, "Address already in use"),)},
            "own port|This worker's port a:1",
            "ss -ltnp",
        ),
    ],
)
def test_what_else_is_wrong_has_its_advice(changes, finding, fix):
    (advice,) = advise(made_up(1, **changes))
    assert advice.broken
    assert any(one in advice.finding for one in finding.split("|"))
    assert fix in advice.fix


def test_a_worker_that_does_not_answer_may_just_not_be_started():
    silent = machine.Port("b:1", local=False, error="Connection refused")
    (advice,) = advise(made_up(1, ports__ports=(silent,)))
    assert not advice.broken
    assert "b:1 does not answer: Connection refused" in advice.finding


def test_a_data_set_may_lie_where_nothing_can_be_written():
    folder = machine.Folder("the data set", "/data", 0, False)
    assert advise(made_up(1, machine__folders=(folder,))) == ()


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("capability", "version", "broken"),
    [("9.0", "12.4", True), ("9.0", "12.5", False), ("8.9", "12.4", False)],
)
def test_hopper_needs_a_driver_that_compiles_for_cuda_12_5(capability, version, broken):
    driver = with_library("libcuda.so.1", version=version)
    facts = made_up(2, probe__gpus=seen("8.0", capability), libraries=driver)
    found = [str(advice) for advice in advise(facts)]
    assert len(found) == broken
    if broken:
        assert found[0].startswith("PROBLEM: The driver runs CUDA 12.4 at most. On GPU")
        assert "driver 555" in found[0]


@pytest.mark.parametrize(("version", "old"), [("9.3", True), ("9.24", False), ("", 0)])
def test_a_cudnn_that_xla_does_not_work_with_is_a_note(version, old):
    cudnn = with_library("libcudnn.so.9", version=version)
    found = advise(made_up(1, libraries=cudnn))
    assert len(found) == old
    if old:
        assert not found[0].broken
        assert "--xla fails with cuDNN 9.3" in found[0].finding
        assert "nvidia-cudnn-cu12>=9.24" in found[0].fix
    assert advise(made_up(0, libraries=cudnn)) == advise(made_up(0))


def old_gpu(*capabilities, cudnn="9.10", errors=(), **changes):
    """A machine with GPUs below compute capability 7.5, and perhaps others."""
    return made_up(
        len(capabilities),
        libraries=with_library("libcudnn.so.9", version=cudnn),
        probe__gpus=seen(*capabilities),
        probe__computations=computed("/cpu:0") + computed("/gpu:0", errors),
        **changes,
    )


@pytest.mark.parametrize("capabilities", [("6.0",), ("6.1",), ("7.0",), ("8.6", "6.1")])
def test_an_old_gpu_needs_an_old_cudnn(capabilities):
    assert advise(old_gpu(*capabilities)) == ()
    errors = {(CONVOLUTION, False): "CUDNN_STATUS_ARCH_MISMATCH"}
    for failing in ((), errors):
        (advice,) = advise(old_gpu(*capabilities, cudnn="9.28", errors=failing))
        assert advice.broken
        assert "cuDNN 9.28 has no code" in advice.finding
        assert "nvidia-cudnn-cu12==9.10.2.21" in advice.fix
    assert advise(old_gpu("7.5", cudnn="9.28")) == ()


def test_no_advice_for_an_old_gpu_brings_the_new_cudnn_back():
    error = "INTERNAL: Autotuner could not find any supported configs for HLO"
    (advice,) = advise(old_gpu("6.1", errors={(CONVOLUTION, True): error}))
    assert not advice.broken
    assert advice.fix.startswith("Train without --xla")
    (advice,) = advise(old_gpu("6.1", errors={(CONVOLUTION, False): "new"}))
    assert "nvidia-cudnn-cu12==9.10.2.21" in advice.fix
    # TensorFlow sees none without libraries; the driver does.
    card = nvidia.Gpu("NVIDIA GeForce GTX 1080", "570.1", "8 GiB", "1 MiB", "6.1")
    lost = {"nvidia__gpus": (card,), "probe__gpus": ()}
    lost["libraries"] = with_library("libcudnn.so.9", error=NOT_THERE, in_wheel=False)
    (advice,) = advise(made_up(1, **lost))
    assert "nvidia-cudnn-cu12==9.10.2.21" in advice.fix
    assert "'.[gpu-old]'" in advice.fix


@pytest.mark.parametrize(("gpus", "workers", "said"), [(1, 0, 0), (2, 0, 1), (1, 2, 1)])
def test_several_gpus_need_nccl(gpus, workers, said):
    nccl = cuda_libraries.Library("libnccl.so.2", "system", "", error="no such file")
    ports = (machine.Port("a:1", local=True, error=""),) * workers
    facts = made_up(gpus, libraries=(*ALL_LOADED, nccl), ports__ports=ports)
    found = advise(facts)
    assert len(found) == said
    if said:
        assert "NCCL: no such file" in found[0].finding
        assert found[0].broken == bool(workers)
        assert "--variable_update towers" in found[0].fix


def test_gpus_are_found_on_the_bus(tmp_path, monkeypatch):
    for slot, vendor, kind in [
        ("01", "0x10de", "0x030200"),
        ("02", "0x10de", "0x040300"),
        ("03", "0x8086", "0x030000"),
    ]:
        device = tmp_path / f"sys/bus/pci/devices/0000:{slot}:00.0"
        write(device / "vendor", f"{vendor}\n")
        write(device / "class", f"{kind}\n")
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    found = nvidia.examine()
    assert found.pci == ("0000:01:00.0",)
    assert found.visible_devices == "1"
    assert found.smi_error == "not installed"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a script in the place of nvidia-smi."""

    def smi(script):
        write(tmp_path / "nvidia-smi", f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return nvidia.examine()

    return smi


def test_what_nvidia_smi_says_is_read(smi):
    rows = (
        "NVIDIA H200, 570.1, 143771 MiB, 5 MiB, 9.0\nNVIDIA T, 570.1, [N/A], 3 MiB, 7.5"
    )
    found = smi(f"echo '{rows}'")
    assert found.gpus == (
        nvidia.Gpu("NVIDIA H200", "570.1", "143771 MiB", "5 MiB", "9.0"),
        nvidia.Gpu("NVIDIA T", "570.1", "[N/A]", "3 MiB", "7.5"),
    )
    assert found.smi_error == ""


def test_what_keeps_nvidia_smi_from_answering_is_kept(smi, monkeypatch):
    assert smi("echo Failed to initialize; exit 18").smi_error == "Failed to initialize"
    assert smi("exit 3").smi_error == "exit code 3"
    monkeypatch.setattr(nvidia, "_SMI_SECONDS", 0.1)
    assert "no answer" in smi("exec sleep 9").smi_error


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages with two wheels: one library is good, one is damaged."""
    mathematics = next(
        path
        for path in map(Path, ("/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/lib"))
        if (path / "libm.so.6").exists()
    )
    cudnn = tmp_path / "site/nvidia/cudnn/lib/libcudnn.so.9"
    write(cudnn, "not a library")
    runtime = tmp_path / "site/nvidia/cuda_runtime/lib/libcudart.so.12"
    runtime.parent.mkdir(parents=True)
    runtime.symlink_to(mathematics / "libm.so.6")
    write(tmp_path / "site/tensorflow/__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path / "site"


def by_name(libraries):
    return {library.name: library for library in libraries}


@pytest.mark.usefixtures("packages")
def test_it_is_known_which_library_fails_and_why():
    found = by_name(cuda_libraries.examine())
    assert found["libcudart.so.12"].error == ""
    assert found["libcudart.so.12"].place == "wheel"
    assert found["libcudnn.so.9"].error.endswith(("file too short", "ELF header"))
    assert "cannot open shared object" in found["libnccl.so.2"].error
    assert found["libnccl.so.2"].place == "system"


def test_a_library_in_ld_library_path_comes_before_the_wheels(
    packages, tmp_path, monkeypatch
):
    write(tmp_path / "system/libcudart.so.12", "an old one")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path / 'system'}")
    found = cuda_libraries.examine()
    assert [each.name for each in found if each.shadows_wheel] == ["libcudart.so.12"]
    assert by_name(found)["libcudart.so.12"].error != ""
    # The wheels' own folders in it hide nothing.
    own = str(packages / "nvidia/cuda_runtime/lib")
    monkeypatch.setenv("LD_LIBRARY_PATH", own)
    assert not any(each.shadows_wheel for each in cuda_libraries.examine())


def test_versions_are_compared_as_numbers():
    assert numbers("12.0") > numbers("9.0")


def test_the_cudnn_of_the_advice_is_that_of_the_extras():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert NEW_CUDNN in extras["gpu"]
    assert OLD_CUDNN in extras["gpu-old"]


@pytest.fixture
def tf_config(monkeypatch):
    def examine(text):
        monkeypatch.setenv("TF_CONFIG", text)
        return machine.examine_ports()

    return examine


def test_a_tf_config_that_makes_no_sense_is_explained(tf_config):
    assert tf_config("{").error.startswith("TF_CONFIG={: ")


def cluster(addresses, index):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def test_own_port_and_other_workers_are_tried(tf_config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = tf_config(cluster(["127.0.0.1:9", address], 0)).ports[1]
        taken.listen()
        own = tf_config(cluster([address, "127.0.0.1:9"], 0)).ports[0]
        answers = tf_config(cluster(["127.0.0.1:9", address], 0)).ports[1]
    assert refused.error == "Connection refused"
    assert own.error == "Address already in use"
    assert answers == machine.Port(address, local=False, error="")
    assert tf_config(cluster([address, "127.0.0.1:9"], 0)).ports[0].error == ""
    assert tf_config("") == machine.Ports()


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/pod/me\n",
            "sys/fs/cgroup/pod/me/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "3000000000\n",
            "sys/fs/cgroup/pod/memory.current": "1000000000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 8\ninactive_file 400000000\n",
            "sys/fs/cgroup/pod/me/cpu.max": "50000 100000\n",
        },
        {
            "proc/self/cgroup": "4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 400000000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_the_limits_of_a_container_count(tmp_path, monkeypatch, files):
    write(tmp_path / "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    for name, text in files.items():
        write(tmp_path / name, text)
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    # Files that are only kept for a next reading make room.
    assert hardware.memory() == hardware.Memory(3 * 10**9, 24 * 10**8)
    assert hardware.processor().usable == 0.5


def test_the_kind_of_machine_is_recognized(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    for name in ("KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    plain = machine.examine({})
    assert not plain.wsl
    assert not plain.container
    assert plain.processor.features is None
    assert plain.memory == hardware.Memory(None, None)
    monkeypatch.setattr(platform, "release", lambda: "5.15-microsoft-standard-WSL2")
    write(tmp_path / "proc/cpuinfo", "model name : X\nflags : sse avx2 amx_bf16 vme\n")
    write(tmp_path / "run/.containerenv", "")
    found = machine.examine({})
    assert found.wsl
    assert found.container
    assert found.processor.model == "X"
    assert found.processor.features == ("avx2", "amx_bf16")


def test_folders_that_are_not_there_yet_are_judged_by_those_around(tmp_path):
    write(tmp_path / "file", "")
    paths = {"a": "a/b", "b": "file/x", "c": "n" * 5000}
    found = machine.examine(
        {purpose: str(tmp_path / path) for purpose, path in paths.items()}
    ).folders
    assert [folder.writable for folder in found[:2]] == [True, False]
    assert found[0].free > 0


CHILD = """
import json, os, sys, time

def main():
    finished = int(sys.argv[2])
    def say(what):
        print(json.dumps(what), flush=True)
    sys.stderr.write("W0000 cuda is old\\nF0000 Check failed: ptx\\n")
    sys.stderr.flush()
    gpu = {"name": "/gpu:0", "model": "X", "capability": "8.0"}
    say({"cuda": "12", "cudnn": "9", "built_for": ["6.0"], "gpus": [gpu]})
    for operation in ("one", "two", "three")[finished:]:
        computation = {"device": "/gpu:0", "operation": operation, "xla": False}
        say({**computation, "error": "not finished"})
        if operation == "two":
            ENDS
        say({**computation, "ms": 1.0})
"""


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("os.abort()", "died of SIGABRT: F0000 Check failed: ptx"),
        ("os._exit(3)", "exit code 3"),
        ("time.sleep(60)", "no answer within 2 s"),
    ],
)
def test_a_process_that_dies_costs_one_computation(tmp_path, monkeypatch, ends, error):
    write(tmp_path / "dying.py", CHILD.replace("ENDS", ends))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tried = probe.run(2.0, module="dying")
    assert [one.operation for one in tried.computations] == ["one", "two", "three"]
    assert [bool(one.error) for one in tried.computations] == [False, True, False]
    assert error in tried.computations[1].error
    assert tried.error == ""
    assert tried.gpus[0].capability == "8.0"
    assert tried.message == "W0000 cuda is old"


def test_a_tensorflow_that_does_not_start_is_told_with_its_last_words(
    tmp_path, monkeypatch
):
    write(tmp_path / "broken.py", "def main():\n    raise ImportError('libx.so')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tried = probe.run(2.0, module="broken")
    assert tried.gpus == ()
    assert "exit code 1: ImportError: libx.so" in tried.error


def test_the_last_words_are_those_that_tell_most():
    written = (
        "I0000 start\nF0000 Check failed: status\n*** Check failure ***\n  @ 0x1 fail\n"
    )
    assert child_process.cause_of_death(-6, written) == (
        "the process died of SIGABRT: F0000 Check failed: status"
    )
    assert "no reason" in child_process.cause_of_death(1, "")


@pytest.mark.parametrize("operation", probe.OPERATIONS)
def test_a_right_result_passes_and_a_wrong_one_does_not(monkeypatch, operation):
    asked = probe.Computation("/cpu:0", operation, xla=False)
    right = probe._compute(asked)
    assert right.error == ""
    assert right.ms > 0
    first, second, expected = probe._problem(operation)
    expected[0, 0] += 1
    monkeypatch.setattr(probe, "_problem", lambda name: (first, second, expected))
    assert probe._compute(asked).error == "the result is wrong by 1"


def test_a_computation_that_raises_says_what(monkeypatch):
    wrong = probe._problem(MATMUL)[0][:, :3]
    monkeypatch.setattr(probe, "_problem", lambda name: (wrong, wrong, wrong))
    failed = probe._compute(probe.Computation("/cpu:0", MATMUL, xla=False))
    assert "Error: " in failed.error


@pytest.fixture
def on(monkeypatch):
    """Runs the report on a made-up machine."""

    def report_on(facts, **options):
        for module, part in [
            (machine, facts.machine),
            (nvidia, facts.nvidia),
            (cuda_libraries, facts.libraries),
        ]:
            monkeypatch.setattr(module, "examine", lambda *_, part=part: part)
        monkeypatch.setattr(probe, "run", lambda *_, **__: facts.probe)
        monkeypatch.setattr(probe, "look", lambda: facts.probe)
        monkeypatch.setattr(machine, "examine_ports", lambda: facts.ports)
        return report.run(Options(**options))

    return report_on


def test_the_report_of_a_healthy_machine_ends_well(on, capsys):
    assert on(made_up(1)) == 0
    written = capsys.readouterr().out
    assert written.endswith("\nNo problem was found.\n")
    for title in ("Machine", "Ports", "Devices", "CUDA libraries"):
        assert f"\n{title}\n" in f"\n{written}"
    assert "/gpu:0 XLA         convolution: ok" in written


def test_the_report_of_a_broken_machine_ends_with_the_fix(on, capsys):
    found = with_library("libcudnn.so.9", error=NOT_THERE, in_wheel=False)
    assert on(made_up(1, **NO_GPU_SEEN, libraries=found)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PROBLEM: TensorFlow finds 0 of 1 NVIDIA GPUs")
    assert " FIX: pip install" in last


def test_json_holds_facts_and_advice(on, capsys):
    assert on(made_up(1, **NO_DRIVER), json=True) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is False
    assert "driver cannot be used" in content["advice"][0]["finding"]
    assert content["nvidia"]["pci"] == ["0000:00:00.0"]


def test_the_short_form_has_only_what_concerns_gpus(on, capsys):
    on(made_up(2, **NO_DRIVER, machine__memory=hardware.Memory(1, 1)))
    capsys.readouterr()
    short = report.explain_missing_gpus()
    assert short.count("\n") == 0
    assert short.startswith("PROBLEM: TensorFlow finds 0 of 2 NVIDIA GPUs")


def test_the_short_form_is_silent_without_a_gpu_and_where_all_are_found(on, capsys):
    for facts in (made_up(0), made_up(2)):
        on(facts)
        assert report.explain_missing_gpus() == ""
    capsys.readouterr()


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "cifar10", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_without_a_command_the_commands_are_listed():
    ended = command()
    assert ended.returncode == 2
    assert "doctor" in ended.stderr
    ended = command("doctor", "--seconds", "0")
    assert ended.returncode == 2
    assert ended.stderr.startswith("python -m cifar10: --seconds 0.0: ")


@pytest.mark.slow
def test_on_this_machine_the_processor_computes(tmp_path):
    variables = {**os.environ, "TF_CONFIG": "garbage"}
    ended = command("doctor", "--json", "--train_dir", str(tmp_path), env=variables)
    content = json.loads(ended.stdout)
    assert ended.stderr == ""
    tried = content["probe"]["computations"]
    assert [one["error"] for one in tried if one["device"] == "/cpu:0"] == [""] * 4
    assert content["ports"]["error"].startswith("TF_CONFIG=garbage: ")
    assert ended.returncode == 1
