"""Turns what was found out into advice, a sentence and a fix for each cause.

Pure functions of `Facts`, so that tests can make up machines.
"""

import re
from collections.abc import Iterator

from cifar10.tools.doctor import missing_gpus
from cifar10.tools.doctor.cuda_libraries import CUDNN, DRIVER, NCCL
from cifar10.tools.doctor.facts import (
    DRIVER_555,
    NEW_CUDNN,
    OLD_CUDNN,
    ON_CPU,
    UNSET_LIBRARY_PATH,
    Advice,
    Facts,
    numbers,
)
from cifar10.tools.doctor.machine import Machine, Ports
from cifar10.tools.doctor.probe import Computation

_REINSTALL = "pip install --force-reinstall 'tensorflow==2.21.*'."

GIGABYTE = 10**9
# A run writes tens of megabytes, the data set 360 with its archive.
_LEAST_DISK = GIGABYTE
# A training of the tutorial's network took 1.1 at most; the rest is for the system.
_LEAST_MEMORY = 2 * GIGABYTE


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Returns what is wrong and what is worth knowing, the most basic first."""
    return (
        *_start(facts),
        *missing_gpus.advise(facts),
        *_versions(facts),
        *_computations(facts),
        *_memory(facts.machine),
        *_folders(facts.machine),
        *_ports(facts.ports),
    )


def _start(facts: Facts) -> Iterator[Advice]:
    if facts.probe.error:
        yield Advice(
            f"TensorFlow does not start: {facts.probe.error}.",
            f"{_REINSTALL} After SIGILL, the processor has no AVX: use another "
            "machine; in a virtual machine pass the host's processor through.",
        )


def _memory(machine: Machine) -> Iterator[Advice]:
    available = machine.memory.available
    if available is not None and available < _LEAST_MEMORY:
        yield Advice(
            f"Only {available / GIGABYTE:.1f} GB of memory are available; a training "
            f"needs about {_LEAST_MEMORY / GIGABYTE:.0f}.",
            "End other programs, or give the container or machine more memory.",
        )


def _folders(machine: Machine) -> Iterator[Advice]:
    for folder in machine.folders:
        # A data set may be read-only; training says so if it has to download one.
        if not folder.writable and "data" not in folder.purpose:
            yield Advice(
                f"{folder.path}, for {folder.purpose}, cannot be written to.",
                "Choose another one with --train_dir or TMPDIR.",
            )
        elif folder.writable and folder.free < _LEAST_DISK:
            yield Advice(
                f"Only {folder.free / GIGABYTE:.2f} GB are free in {folder.path}, for "
                f"{folder.purpose}.",
                "Make room, keep fewer checkpoints (--keep_checkpoints), or choose "
                "another disk with --train_dir, --data_dir or TMPDIR.",
            )


def _ports(ports: Ports) -> Iterator[Advice]:
    if ports.error:
        yield Advice(
            f"TF_CONFIG cannot be used. {ports.error}.",
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


def _versions(facts: Facts) -> Iterator[Advice]:
    """Yields what fails later: a training on Hopper, with XLA, on several GPUs."""
    library = {library.name: library for library in facts.libraries}
    newest = max((numbers(gpu.capability) for gpu in facts.probe.gpus), default=())
    driver = library[DRIVER].version
    if newest >= (9, 0) and driver and numbers(driver) < (12, 5):
        yield Advice(
            f"The driver runs CUDA {driver} at most. On GPUs of compute capability "
            "9.0 and above TensorFlow compiles its small kernels for CUDA 12.5.",
            "Install NVIDIA's driver 555 or newer and restart the machine.",
        )
    cudnn = library[CUDNN].version
    if _is_too_new(cudnn, facts):
        yield Advice(
            f"cuDNN {cudnn} has no code for GPUs of compute capability below 7.5, as "
            "Pascal and Volta are.",
            f"pip install '{OLD_CUDNN}', as the extra gpu-old does, and train without "
            "--xla.",
        )
    elif newest and cudnn and numbers(cudnn) < (9, 24) and not facts.has_old_gpu:
        yield Advice(
            f"--xla fails with cuDNN {cudnn}: XLA finds no configuration for "
            "convolutions.",
            f"pip install '{NEW_CUDNN}'; PyTorch may have brought the older one.",
            broken=False,
        )
    several = len(facts.probe.gpus) > 1 or facts.ports.ports
    if newest and several and NCCL in library and library[NCCL].error:
        yield Advice(
            f"Several GPUs cannot reduce over NCCL: {library[NCCL].error}.",
            f"{facts.install}; or train with --variable_update towers.",
            broken=bool(facts.ports.ports),  # One machine uses it on request only.
        )


def _is_too_new(cudnn: str, facts: Facts) -> bool:
    return facts.has_old_gpu and numbers(cudnn) >= (9, 11)


# A pattern in the error of a computation on a GPU, and the fix.
_GPU_FIXES = {
    "out.of.memory|resourceexhausted|resource_exhausted|failed to allocate": (
        "Other programs use its memory: nvidia-smi lists them. End them, or set "
        "CUDA_VISIBLE_DEVICES."
    ),
    "could not find any supported configs": f"pip install '{NEW_CUDNN}'.",
    "no answer": (
        "The first computation on a GPU newer than TensorFlow compiles for minutes: "
        "try --seconds 1800. Otherwise nvidia-smi shows what keeps the GPU busy; "
        f"restart the machine. {ON_CPU}."
    ),
}


def _computations(facts: Facts) -> Iterator[Advice]:
    """Yields a piece of advice for each device on which a computation failed."""
    # The first failure of a device; the plain computations come before those with XLA.
    failed: dict[str, Computation] = {}
    for computation in facts.probe.computations:
        if computation.error:
            failed.setdefault(computation.device, computation)
    (cudnn,) = (library for library in facts.libraries if library.name == CUDNN)
    for first in failed.values():
        if "gpu" in first.device and _is_too_new(cudnn.version, facts):
            continue  # That is why.
        how = "with XLA" if first.xla else "plain"
        yield Advice(
            f"A {first.operation} on {first.device} fails ({how}): "
            f"{first.error[:200]}.",
            _fix(facts, first),
            # Nobody can have both: the cuDNN that XLA needs has no code for these.
            broken=not (first.xla and facts.has_old_gpu),
        )


def _fix(facts: Facts, failure: Computation) -> str:
    gpu = next((gpu for gpu in facts.probe.gpus if gpu.name == failure.device), None)
    if gpu and not (failure.xla and facts.has_old_gpu):
        libraries = [item.path for item in facts.libraries if item.shadows_wheel]
        if libraries:
            return f"{UNSET_LIBRARY_PATH}: {', '.join(libraries)}."
        for pattern, fix in _GPU_FIXES.items():
            if re.search(pattern, failure.error, re.IGNORECASE):
                return fix
    if failure.xla:
        return "Train without --xla, which is the default; without XLA it works."
    if not gpu:
        return _REINSTALL
    newest = next(reversed(facts.probe.built_for), "")
    if numbers(gpu.capability) > numbers(newest):
        return (
            f"TensorFlow was built for compute capabilities up to {newest}, and the "
            f"GPU has {gpu.capability}: use NVIDIA's container (an older release of "
            "nvcr.io/nvidia/tensorflow), or a TensorFlow built from source with CUDA "
            f"12.8 or newer. {ON_CPU}."
        )
    return (
        f"Install {DRIVER_555}, and {facts.install}, whose cuDNN PyTorch may have "
        f"replaced; restart the machine. {ON_CPU}."
    )
