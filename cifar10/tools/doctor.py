"""`python -m cifar10 doctor`: what is wrong with this machine, and what mends it.

A fact is a dictionary: of the machine, of NVIDIA's driver or a library, of TensorFlow,
or of a computation on a device. If something is wrong, it has an `error`.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cifar10.config import flags, layout
from cifar10.config.fields import TRAIN_DIR
from cifar10.config.options import Checked
from cifar10.distributed import barrier, cluster
from cifar10.errors import UsageError
from cifar10.process import invocation
from cifar10.tools import doctor_probe
from cifar10.tools.doctor_probe import DRIVER, NCCL, SMI, TENSORFLOW, Fact
from cifar10.towers import hardware

HELP = "find out why a GPU is not found, or what else is wrong here"
DESCRIPTION = """Finds out why a GPU is not found, or what else is wrong here.

    python -m cifar10 doctor

Looks at versions, processor, memory, disk, this worker's port of TF_CONFIG,
NVIDIA's devices, driver and libraries, and computes a little on each device,
plain and with XLA. Problems are listed at the end, each with its fix. Exit code 0:
training can run as the machine stands, with or without a GPU; 1: something is
broken; 2: a wrong flag.
"""

# cuDNN 9.11 dropped the GPUs below; XLA finds no configuration for convolutions in
# versions before 9.24, which PyTorch may bring.
NEW_GPU = (7, 5)
OLD_CUDNN = "nvidia-cudnn-cu12==9.10.2.21"
NEW_CUDNN = "nvidia-cudnn-cu12>=9.24,<10"
# The newest compute capability for which TensorFlow 2.21 and 2.22 have code. The
# driver compiles the small kernels for it, from what CUDA 12.5 wrote.
NEWEST_GPU = (9, 0)

# In gigabytes. A run writes tens of megabytes, the data set 360 with its archive.
_LEAST_DISK = 1.0
# A training of the tutorial's network took 1.1 at most; the rest is for the system.
_LEAST_MEMORY = 2.0
# The driver wakes eight sleeping GPUs in less than half of it.
_DRIVER_SECONDS = 60.0
# TensorFlow starts in 5 s, with a slow disk and eight GPUs in a minute; a GPU that is
# newer than TensorFlow compiles its first kernels.
_COMPUTATION_SECONDS = 600.0

_INSTALL_DRIVER = (
    "Install NVIDIA's driver 555 or newer (for Pascal and Volta 580, the last one; "
    "Ubuntu: sudo ubuntu-drivers install; for WSL in Windows) and restart the machine; "
    "sudo dmesg shows why it does not load, such as for want of a signature. "
    "A container needs --gpus all (Docker) or a limit nvidia.com/gpu (Kubernetes)."
)
_ON_CPU = "To train on the CPU meanwhile, put CUDA_VISIBLE_DEVICES=-1 before a command."
_RESTART = (
    "Restart the machine; if it has an NVSwitch, sudo systemctl start "
    f"nvidia-fabricmanager. {_ON_CPU}"
)
_REINSTALL = "pip install --force-reinstall"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """What to look at.

    Attributes:
        train_dir: directory of runs
        data_dir: directory of the data set (default: $CIFAR10_DATA_DIR, else
            ~/.cache/cifar10)
        json: print all that was found as JSON
    """

    train_dir: str = TRAIN_DIR
    data_dir: str | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Advice:
    """A problem, or a note if nothing is broken, and what to do about it."""

    finding: str
    fix: str
    broken: bool = True

    def __str__(self) -> str:
        label = "PROBLEM" if self.broken else "NOTE"
        return f"{label}: {self.finding} FIX: {self.fix}"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    facts = {}
    for name, fact in _find_facts(options):
        facts[name] = fact
        if not options.json:
            shown = [f"{key} {value}" for key, value in fact.items()]
            print(f"{name}: {', '.join(shown)}", flush=True)
    advice = [*advise(facts)]
    broken = any(piece.broken for piece in advice)
    if options.json:
        pieces = [dataclasses.asdict(piece) for piece in advice]
        content = {"ok": not broken, "advice": pieces, "facts": facts}
        print(json.dumps(content, indent=2))
    else:
        print("", *advice, *([] if broken else ["No problem was found."]), sep="\n")
    return int(broken)


def explain_missing_gpus() -> str:
    """Returns why TensorFlow finds fewer GPUs than there are, a line for each cause.

    It computes nothing, and uses the TensorFlow of this process. The text is empty if
    no GPU is missing.
    """
    facts = {**_examine_nvidia(), TENSORFLOW: doctor_probe.describe_tensorflow()}
    gpus = Gpus(facts)
    return "\n".join(map(str, _advise_on_gpus(facts, gpus))) if gpus.missing else ""


def _find_facts(options: Options) -> Iterator[tuple[str, Fact]]:
    versions = {
        "python": sys.version.split()[0],
        "cifar10": invocation.package_version(),
    }
    yield "system", {"name": platform.platform(), **versions}
    cpu, memory = hardware.processor(), hardware.memory()
    yield "processor", {"model": cpu.model, "cores": cpu.cores, "usable": cpu.usable}
    free = _gigabytes(memory.available)
    yield "memory", {"GB": _gigabytes(memory.total), "free GB": free}
    data_dir = options.data_dir or os.environ.get("CIFAR10_DATA_DIR")
    for use, path in (
        ("runs", options.train_dir),
        ("data set", data_dir or "~/.cache/cifar10"),
        ("temporary files", tempfile.gettempdir()),
    ):
        folder = layout.absolute_path(path)
        there = next(filter(os.path.exists, (folder, *folder.parents)))
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        free = _gigabytes(shutil.disk_usage(there).free)
        yield use, {"path": str(folder), "free GB": free, "writable": writable}
    yield cluster.TF_CONFIG, _examine_port()
    nvidia = _examine_nvidia()
    yield from nvidia.items()
    # A driver that stalls nvidia-smi would stall TensorFlow.
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if Gpus(nvidia).stalled else {}
    yield from doctor_probe.find_facts(
        TENSORFLOW, _COMPUTATION_SECONDS, **hidden
    ).items()


def _gigabytes(size: int | None) -> float | None:
    return None if size is None else round(size / 10**9, 2)


def _examine_port() -> Fact:
    """Opens this worker's port; a training waits for the others and names them."""
    try:
        if not (found := cluster.from_environment(os.environ)):
            return {"workers": 1}
        barrier.bind_port(found).close()
    except UsageError as error:
        return {"error": " ".join(str(error).split("\n"))}
    return {"workers": len(found.workers), "free port": found.this_worker.address}


def _examine_nvidia() -> dict[str, Fact]:
    """Counts the GPUs on the bus, asks the driver, and loads TensorFlow's libraries.

    TensorFlow looks in LD_LIBRARY_PATH, then in NVIDIA's wheels, then in the system's
    folders.
    """
    count = sum(
        (device / "vendor").read_text().strip() == "0x10de"
        and (device / "class").read_text().startswith("0x03")  # Displays.
        for device in (hardware.ROOT / "sys/bus/pci/devices").glob("*")
    )
    search_path = [os.environ.get("LD_LIBRARY_PATH", "")]
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        search_path += map(str, Path(folder).glob("*/lib"))
    variables = {"LD_LIBRARY_PATH": ":".join(filter(None, search_path))}
    return {"PCI bus": {"gpus": count}} | doctor_probe.find_facts(
        SMI, _DRIVER_SECONDS, **variables
    )


class Gpus:
    """What the facts say about NVIDIA's GPUs."""

    def __init__(self, facts: dict[str, Fact]) -> None:
        smi, driver = facts[SMI], facts.get(DRIVER, {})
        rows = smi.get("gpus", [])
        # How many TensorFlow finds, and how many there are, whether or not they work.
        self.found = facts.get(TENSORFLOW, {}).get("gpus", 0)
        self.stalled = "unfinished" in smi or "unfinished" in driver
        # In a container the bus has the host's.
        on_bus = facts["PCI bus"]["gpus"]
        self.count = len(rows) or self.found or on_bus or int(self.stalled)
        self.missing = self.count > self.found
        self.driver_error = smi.get("error") or driver.get("error")
        self.cuda = driver.get("version", "")  # The newest that the driver runs.
        capabilities = [_numbers(row.split(", ")[-1]) for row in rows]
        self.newest = max(capabilities, default=())
        self.has_old = any(() < capability < NEW_GPU for capability in capabilities)
        old = f" '{OLD_CUDNN}'" * self.has_old
        version = facts.get(TENSORFLOW, {}).get("version", "2.21.*")
        self.install = f"{_REINSTALL} 'tensorflow[and-cuda]=={version}'{old}"


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to compare it: (9, 0) for `9.0`."""
    return tuple(map(int, re.findall(r"\d+", version)))


def advise(facts: dict[str, Fact]) -> Iterator[Advice]:
    """Yields what is wrong and what is worth knowing, the most basic first."""
    yield from _advise_on_machine(facts)
    if error := facts[TENSORFLOW].get("error"):
        yield Advice(
            f"TensorFlow does not start: {error}.",
            f"{_REINSTALL} 'tensorflow>=2.21,<2.23'. After SIGILL, the processor has "
            "no AVX: use another machine; in a virtual one pass the host's through.",
        )
        return
    gpus = Gpus(facts)
    yield from _advise_on_gpus(facts, gpus)
    for name, fact in facts.items():
        if name.startswith("/") and "error" in fact:
            yield _advise_on_computation(name, fact["error"], gpus)


def _advise_on_machine(facts: dict[str, Fact]) -> Iterator[Advice]:
    free = facts["memory"]["free GB"]
    if free is not None and free < _LEAST_MEMORY:
        text = f"Only {free} GB of memory are free; a training needs {_LEAST_MEMORY:g}."
        yield Advice(text, "End other programs, or give the container more memory.")
    for use in ("runs", "data set", "temporary files"):
        path, free, writable = facts[use].values()
        # A data set may be read-only; training says so if it has to download one.
        if free < _LEAST_DISK if writable else use != "data set":
            state = f"{free} GB free" if writable else "not writable"
            yield Advice(
                f"{path}, the folder of the {use}, is not usable: {state}.",
                "Make room, keep fewer checkpoints (--keep_checkpoints), or choose "
                "another folder with --train_dir, --data_dir or TMPDIR.",
            )
    if error := facts[cluster.TF_CONFIG].get("error"):
        fix = "Otherwise unset TF_CONFIG, to train on this machine alone."
        yield Advice(f"TF_CONFIG: {error}", fix)


def _advise_on_gpus(facts: dict[str, Fact], gpus: Gpus) -> Iterator[Advice]:
    """Yields what keeps TensorFlow from the GPUs, and what fails later."""
    if not gpus.count:
        fix = f"None is needed. If there is one: {_INSTALL_DRIVER}"
        text = "There is no NVIDIA GPU; training runs on the CPU."
        yield Advice(text, fix, broken=False)
        return
    if gpus.missing:
        text = f"TensorFlow finds {gpus.found} of {gpus.count} NVIDIA GPUs"
        fix = (
            "See below; otherwise TF_CPP_MAX_VLOG_LEVEL=3 before a command shows which "
            "files TensorFlow opens."
        )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            text += f" of those in CUDA_VISIBLE_DEVICES={visible}"
            fix = "Unset CUDA_VISIBLE_DEVICES to use all of them."
        yield Advice(f"{text}.", fix, broken=visible is None)
        if gpus.driver_error:
            # A driver that says its version, or nothing, is installed.
            is_installed = gpus.cuda or gpus.stalled
            fix = f"{_RESTART} Otherwise: " * bool(is_installed) + _INSTALL_DRIVER
            yield Advice(f"NVIDIA's driver cannot be used: {gpus.driver_error}.", fix)
    needed = "12.5" if gpus.newest >= NEWEST_GPU else "12.0"
    if () < _numbers(gpus.cuda) < _numbers(needed):
        text = f"The driver runs CUDA {gpus.cuda} at most; these GPUs need {needed}."
        yield Advice(text, _INSTALL_DRIVER)
    yield from _advise_on_libraries(facts, gpus)


def _advise_on_libraries(facts: dict[str, Fact], gpus: Gpus) -> Iterator[Advice]:
    if not facts[TENSORFLOW]["has_cuda"]:
        fix = f"pip uninstall tensorflow tensorflow-cpu, and then {gpus.install}."
        yield Advice("TensorFlow was built without CUDA.", fix)
    failing = {
        name: fact["error"]
        for name, fact in facts.items()
        if ".so." in name and "error" in fact and name != DRIVER
    }
    several_machines = cluster.TF_CONFIG in os.environ
    if gpus.count == 1 and not several_machines:
        failing.pop(NCCL, None)
    if failing:
        first = next(iter(failing.values()))
        text = f"TensorFlow cannot open {', '.join(failing)}: {first}."
        path = os.environ.get("LD_LIBRARY_PATH")
        fix = f"LD_LIBRARY_PATH={path} comes first: unset it, or " if path else ""
        # One machine needs NCCL for --variable_update mirrored alone.
        broken = several_machines or list(failing) != [NCCL]
        yield Advice(text, f"{fix}{gpus.install}.", broken)


def _advise_on_computation(name: str, error: str, gpus: Gpus) -> Advice:
    fix = (
        "End the programs that fill its memory (nvidia-smi lists them), or "
        f"{gpus.install}; restart the machine. {_ON_CPU}"
    )
    on_gpu, with_xla = "gpu" in name, name.endswith("XLA")
    if with_xla:
        fix = "Train without --xla, which is the default"
        # Nobody can have both: the cuDNN that XLA needs has no code for old GPUs.
        can_have_both = on_gpu and not gpus.has_old
        fix += f", or pip install '{NEW_CUDNN}'." if can_have_both else "."
    elif on_gpu and gpus.has_old:
        fix = (
            f"pip install '{OLD_CUDNN}', as the extra gpu-old does: a later cuDNN has "
            "no code for Pascal and Volta. Train without --xla."
        )
    elif on_gpu and gpus.newest > NEWEST_GPU:
        fix = (
            "TensorFlow has no code for compute capabilities above 9.0: use NVIDIA's "
            "container, an older release of nvcr.io/nvidia/tensorflow, or a "
            f"TensorFlow built from source with CUDA 12.8 or newer. {_ON_CPU}"
        )
    text = f"A computation on {name} fails: {error}."
    return Advice(text, fix, broken=not with_xla)
