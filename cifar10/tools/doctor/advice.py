"""What to do: from what was found to sentences, one for each cause.

Pure functions of `Facts`, so that machines which nobody here has can be tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cifar10.tools.doctor import gpu_advice
from cifar10.tools.doctor.facts import INSTALL, ON_CPU, Advice, Facts
from cifar10.tools.doctor.machine import Machine
from cifar10.tools.doctor.ports import Ports
from cifar10.tools.doctor.probe import Computation

_REINSTALL = (
    "Install TensorFlow anew: pip install --force-reinstall 'tensorflow==2.21.*'."
)

GIGABYTE = 10**9
# A run writes tens of megabytes, the data set 360 with its archive.
_LEAST_DISK = GIGABYTE
# What a training of the tutorial's network took at most, 1.1, and what a system needs.
_LEAST_MEMORY = 2 * GIGABYTE


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Returns what is wrong and what is worth knowing, the most basic first.

    Args:
        facts: What was found out.
    """
    return (
        *_start(facts),
        *gpu_advice.why_not_found(facts),
        *_computations(facts),
        *_memory(facts.machine),
        *_disk(facts.machine),
        *_ports(facts.ports),
    )


def _start(facts: Facts) -> Iterator[Advice]:
    features = facts.machine.processor.features
    x86 = facts.machine.architecture in ("x86_64", "AMD64")
    if not facts.machine.versions.get("tensorflow"):
        yield Advice("TensorFlow is not installed.", "pip install -e . in this folder.")
    elif x86 and features is not None and "avx" not in features:
        yield Advice(
            "The processor has no AVX, and TensorFlow's package stops without it "
            "(illegal instruction).",
            "Take another machine; in a virtual machine pass the host's processor "
            "through (QEMU: -cpu host).",
        )
    elif facts.machine.system == "Linux" and facts.machine.memory.total is None:
        yield Advice(
            "/proc cannot be read, and TensorFlow stops without it.",
            "Mount it: mount -t proc proc /proc. A sandbox has to let it in.",
        )
    elif facts.probe.view is None:
        yield Advice(
            f"TensorFlow does not start: {facts.probe.error}.",
            _REINSTALL,
        )


def _memory(machine: Machine) -> Iterator[Advice]:
    available = machine.memory.available
    if available is not None and available < _LEAST_MEMORY:
        where = " (its limit counts)" if machine.container else ""
        yield Advice(
            f"Only {available / GIGABYTE:.1f} GB of memory are available{where}; a "
            f"training needs about {_LEAST_MEMORY / GIGABYTE:.0f}.",
            "End other programs, or give the container or machine more memory.",
        )


def _disk(machine: Machine) -> Iterator[Advice]:
    for folder in machine.folders:
        # A data set that is there is only read.
        if not folder.writable and not (
            folder.holds_files and "data" in folder.purpose
        ):
            yield Advice(
                f"{folder.path}, for {folder.purpose}, cannot be written to.",
                "Choose another one with --train_dir, --data_dir or, for temporary "
                "files, the variable TMPDIR.",
            )
        elif folder.writable and folder.free is not None and folder.free < _LEAST_DISK:
            yield Advice(
                f"Only {folder.free / GIGABYTE:.2f} GB are free in {folder.path}, for "
                f"{folder.purpose}.",
                "Make room, keep fewer checkpoints (--keep_checkpoints), or choose "
                "another disk with --train_dir, --data_dir or the variable TMPDIR.",
            )


def _ports(ports: Ports) -> Iterator[Advice]:
    if ports.error:
        yield Advice(
            f"TF_CONFIG makes no sense: {ports.error}.",
            "Correct it, or unset TF_CONFIG to train on this machine alone.",
        )
    for port in ports.ports:
        if port.own and port.error:
            yield Advice(
                f"This worker's port {port.address} cannot be opened: {port.error}.",
                "End the program that holds it (ss -ltnp shows it; an earlier worker "
                "perhaps), or name another port in the TF_CONFIG of every worker.",
            )
        elif port.error:
            yield Advice(
                f"The worker {port.address} does not answer: {port.error}.",
                "That is right as long as it is not started. If it runs, look at the "
                "name, the port and the firewall between the machines.",
                broken=False,
            )


# A text in the error of a computation on a GPU; what it means; what to do.
_ON_GPU = (
    (
        "out.of.memory|resourceexhausted|resource_exhausted|failed to allocate",
        "its memory is taken by other programs",
        "nvidia-smi shows which; end them, or give CUDA_VISIBLE_DEVICES=NUMBER.",
    ),
    (
        "unsupported.ptx|unsupported toolchain",
        "the driver is too old to compile TensorFlow's kernels for it",
        f"Install NVIDIA's driver 555 or newer. {ON_CPU}.",
    ),
    (
        "libdevice|ptxas|nvlink|nvjitlink",
        "CUDA's compiler is missing or does not fit",
        f"{INSTALL} brings it; or leave out --xla.",
    ),
    (
        "cudnn|dnn library",
        "cuDNN does not work",
        f"{INSTALL} brings one that fits; PyTorch beside it may replace it.",
    ),
)
# What CUDA and LLVM say where a GPU is newer than what TensorFlow was built for.
_NOT_FOR_THIS_GPU = (
    "invalid.ptx|ptx version|does not support target|invalid.handle|no.binary.for.gpu"
    "|no kernel image|invalid.(resource.handle|image|source)"
)


def _computations(facts: Facts) -> Iterator[Advice]:
    """Yields what is wrong with the computations that failed, once for each device."""
    tried = facts.probe.computations
    for device in dict.fromkeys(one.device for one in tried):
        failed = [one for one in tried if one.device == device and one.error]
        if failed:
            yield _why(facts, device, failed)
    if facts.probe.view is not None and facts.probe.error:
        yield Advice(
            f"The computations ended early: {facts.probe.error}.",
            "Run it again; if it stays so, restart the machine.",
        )


def _why(facts: Facts, device: str, failed: list[Computation]) -> Advice:
    first = failed[0]
    how = "with XLA" if all(one.xla for one in failed) else "plain"
    what = f"A {first.operation} on {device} fails ({how}): {first.error[:200]}"
    errors = " ".join(one.error for one in failed)
    if not device.startswith("/cpu"):
        if re.search(_NOT_FOR_THIS_GPU, errors, re.IGNORECASE) and _is_newer(
            facts, device
        ):
            return _newer(facts, device, what, plain_works=how == "with XLA")
        if facts.libraries.shadowed:
            return gpu_advice.shadow(facts.libraries.shadowed, f"{what}.")
        for pattern, meaning, fix in _ON_GPU:
            if re.search(pattern, errors, re.IGNORECASE):
                return Advice(f"{what}. It means that {meaning}.", fix)
    if how == "with XLA":
        return Advice(
            f"{what}. Without XLA it works.",
            "Train without --xla, which is the default.",
        )
    if "no answer" in first.error:
        fix = (
            "A GPU newer than TensorFlow compiles for minutes at first: try --seconds "
            "1800. Otherwise nvidia-smi shows what keeps it busy; restart the machine."
        )
    elif "wrong by" in first.error:
        fix = "The device miscalculates: undo overclocking, check it, use another one."
    else:
        fix = f"Update the driver and {INSTALL}; restart the machine."
    if device.startswith("/cpu"):
        return Advice(f"{what}.", _REINSTALL)
    return Advice(f"{what}.", f"{fix} {ON_CPU}.")


def _is_newer(facts: Facts, device: str) -> bool:
    view = facts.probe.view
    for gpu in view.gpus if view else ():
        if gpu.name == device and gpu.capability:
            return gpu.capability > max(facts.built_for, default=(0, 0))
    return False


def _newer(facts: Facts, device: str, what: str, *, plain_works: bool) -> Advice:
    newest = max(facts.built_for)
    meaning = (
        f"{what}. {device} is newer than this TensorFlow, which was built for compute "
        f"capabilities up to {newest[0]}.{newest[1]}."
    )
    if plain_works:
        return Advice(meaning, "Train without --xla, which is the default.")
    return Advice(
        meaning,
        "Use a TensorFlow that was built for this GPU: NVIDIA's container "
        "(nvcr.io/nvidia/tensorflow, an older release) or one built from source with "
        f"CUDA 12.8 or newer. {ON_CPU}.",
    )
