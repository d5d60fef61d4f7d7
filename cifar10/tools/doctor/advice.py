"""From what was found out to advice, a sentence and a fix for each cause.

Pure functions of `Facts`, so that tests can make up machines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cifar10.tools.doctor import missing_gpus
from cifar10.tools.doctor.facts import INSTALL, ON_CPU, Advice, Facts, numbers
from cifar10.tools.doctor.machine import Machine
from cifar10.tools.doctor.ports import Ports
from cifar10.tools.doctor.probe import Computation

_REINSTALL = (
    "Install TensorFlow again: pip install --force-reinstall 'tensorflow==2.21.*'."
)
_SLOW = (
    "The first computation on a new GPU compiles for minutes: try --seconds 1800. "
    f"nvidia-smi shows what keeps a GPU busy; restart the machine. {ON_CPU}."
)
_BUILD_FOR_NEW_GPU = (
    "Use a TensorFlow that was built for this GPU: NVIDIA's container "
    "(nvcr.io/nvidia/tensorflow, an older release) or one built from source with "
    f"CUDA 12.8 or newer. {ON_CPU}."
)

GIGABYTE = 10**9
# A run writes tens of megabytes, the data set 360 with its archive.
_LEAST_DISK = GIGABYTE
# A training of the tutorial's network took 1.1 at most; the rest is for the system.
_LEAST_MEMORY = 2 * GIGABYTE


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Returns what is wrong and what is worth knowing, the most basic first.

    Args:
        facts: What was found out about the machine.
    """
    return (
        *_start(facts),
        *missing_gpus.advise(facts),
        *_computations(facts),
        *_memory(facts.machine),
        *_folders(facts.machine),
        *_ports(facts.ports),
    )


def _start(facts: Facts) -> Iterator[Advice]:
    machine = facts.machine
    features = machine.processor.features
    if not machine.versions.get("tensorflow"):
        yield Advice("TensorFlow is not installed.", "pip install -e . in this folder.")
    elif features is not None and "avx" not in features:
        yield Advice(
            "The processor has no AVX, and TensorFlow's package stops without it "
            "(illegal instruction).",
            "Use another machine; in a virtual machine pass the host's processor "
            "through (QEMU: -cpu host).",
        )
    elif machine.platform.startswith("Linux") and machine.memory.total is None:
        yield Advice(
            "/proc cannot be read, and TensorFlow stops without it.",
            "Mount it: mount -t proc proc /proc. A sandbox has to let it in.",
        )
    elif facts.probe.error:
        yield Advice(f"TensorFlow does not start: {facts.probe.error}.", _REINSTALL)


def _memory(machine: Machine) -> Iterator[Advice]:
    available = machine.memory.available
    if available is not None and available < _LEAST_MEMORY:
        limit = " within the container's limit" if machine.container else ""
        yield Advice(
            f"Only {available / GIGABYTE:.1f} GB of memory are available{limit}; a "
            f"training needs about {_LEAST_MEMORY / GIGABYTE:.0f}.",
            "End other programs, or give the container or machine more memory.",
        )


def _folders(machine: Machine) -> Iterator[Advice]:
    for folder in machine.folders:
        # A data set that is complete is only read.
        only_read = folder.holds_files and "data" in folder.purpose
        if not folder.writable and not only_read:
            yield Advice(
                f"{folder.path}, for {folder.purpose}, cannot be written to.",
                "Choose another one with --train_dir, --data_dir or, for temporary "
                "files, the variable TMPDIR.",
            )
        elif folder.writable and folder.free < _LEAST_DISK:
            yield Advice(
                f"Only {folder.free / GIGABYTE:.2f} GB are free in {folder.path}, for "
                f"{folder.purpose}.",
                "Make room, keep fewer checkpoints (--keep_checkpoints), or choose "
                "another disk with --train_dir, --data_dir or the variable TMPDIR.",
            )


def _ports(ports: Ports) -> Iterator[Advice]:
    if ports.error:
        yield Advice(
            f"TF_CONFIG cannot be used: {ports.error}.",
            "Correct it, or unset TF_CONFIG to train on this machine alone.",
        )
    for port in ports.ports:
        if port.local and port.error:
            yield Advice(
                f"This worker's port {port.address} cannot be opened: {port.error}.",
                "End the program that holds it (ss -ltnp shows it; perhaps an earlier "
                "worker), or choose another port in the TF_CONFIG of every worker.",
            )
        elif port.error:
            yield Advice(
                f"The worker {port.address} does not answer: {port.error}.",
                "Start it. If it is running, check the name, the port and the firewall "
                "between the machines.",
                broken=False,
            )


def _computations(facts: Facts) -> Iterator[Advice]:
    """Yields a piece of advice for each device on which a computation failed."""
    failed: dict[str, list[Computation]] = {}
    for computation in facts.probe.computations:
        if computation.error:
            failed.setdefault(computation.device, []).append(computation)
    for device, (first, *others) in failed.items():
        only_xla = first.xla and all(computation.xla for computation in others)
        how = "with XLA" if only_xla else "plain"
        finding = f"A {first.operation} on {device} fails ({how}): {first.error[:200]}."
        errors = " ".join(computation.error for computation in (first, *others))
        for pattern, meaning, fix in _causes(facts, device, only_xla=only_xla):
            if re.search(pattern, errors, re.IGNORECASE):
                yield Advice(f"{finding} {meaning}".strip(), fix)
                break


def _causes(
    facts: Facts, device: str, *, only_xla: bool
) -> Iterator[tuple[str, str, str]]:
    """Yields patterns of errors with their meaning and fix; the last one fits all."""
    on_gpu = not device.startswith("/cpu")
    if on_gpu:
        yield (
            "out.of.memory|resourceexhausted|resource_exhausted|failed to allocate",
            "Other programs use its memory.",
            "nvidia-smi lists them; end them, or set CUDA_VISIBLE_DEVICES.",
        )
        yield (
            "unsupported.ptx|unsupported toolchain",
            "The driver is too old to compile TensorFlow's kernels for this GPU.",
            f"Install NVIDIA's driver 555 or newer. {ON_CPU}.",
        )
        yield (
            "libdevice|ptxas|nvlink|nvjitlink",
            "CUDA's compiler is missing or does not fit.",
            f"{INSTALL} installs it; or train without --xla.",
        )
    if only_xla:
        yield "", "Without XLA it works.", "Train without --xla, which is the default."
    if not on_gpu:
        yield "", "", _REINSTALL
        return
    yield "no answer", "It is busy, or newer than this TensorFlow.", _SLOW
    newest = next(reversed(facts.probe.built_for), "")
    (gpu,) = (gpu for gpu in facts.probe.gpus if gpu.name == device)
    if numbers(gpu.capability) > numbers(newest):
        meaning = f"This TensorFlow was built for compute capabilities up to {newest}."
        yield "", f"{meaning} {device} has {gpu.capability}.", _BUILD_FOR_NEW_GPU
    if shadowing := [library for library in facts.libraries if library.shadows_wheel]:
        advice = missing_gpus.shadow(shadowing)
        yield "", advice.finding, advice.fix
    yield (
        "cudnn|dnn library",
        "cuDNN does not work.",
        f"{INSTALL} installs one that fits; PyTorch beside it may replace it.",
    )
    yield (
        "wrong by",
        "The device miscalculates.",
        f"Undo overclocking, test the device, use another one. {ON_CPU}.",
    )
    yield "", "", f"Update the driver and {INSTALL}; restart the machine. {ON_CPU}."
