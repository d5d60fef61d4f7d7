"""Finds out everything, and prints it with advice as lines or as JSON."""

import dataclasses
import json
import os
from collections.abc import Iterator

from cifar10.tools.doctor import cuda_libraries, machine, missing_gpus, nvidia, probe
from cifar10.tools.doctor.advice import GIGABYTE, advise
from cifar10.tools.doctor.facts import Facts
from cifar10.tools.doctor.options import Options

# Names and values.
_Rows = Iterator[tuple[str, str]]


def run(options: Options) -> int:
    """Prints what is found, and advice; returns 1 if something is broken, else 0."""
    if not options.json:
        limit = f", at most {options.seconds:g} s a computation" * options.compute
        print(f"(TensorFlow starts in another process{limit}.)\n", flush=True)
    data_dir = options.data_dir or os.environ.get("CIFAR10_DATA_DIR")
    folders = {
        "runs": options.train_dir,
        "the data set": data_dir or "~/.cache/cifar10",
    }
    facts = Facts(
        machine=machine.examine(folders),
        ports=machine.examine_ports(),
        nvidia=nvidia.examine(),
        libraries=cuda_libraries.examine(),
        probe=probe.run(options.seconds, compute=options.compute),
    )
    advice = advise(facts)
    broken = any(piece.broken for piece in advice)
    if options.json:
        pieces = [dataclasses.asdict(piece) for piece in advice]
        content = {"ok": not broken, "advice": pieces, **dataclasses.asdict(facts)}
        print(json.dumps(content, indent=2))
    else:
        _print_facts(facts)
        print(*advice, *([] if broken else ["No problem was found."]), sep="\n")
    return int(broken)


def explain_missing_gpus() -> str:
    """Returns why TensorFlow finds fewer GPUs than there are, a line for each cause.

    It computes nothing, and uses the TensorFlow of this process. The text is empty if
    nothing is known to be wrong.
    """
    facts = Facts(
        machine=machine.examine({}),
        ports=machine.Ports(),
        nvidia=nvidia.examine(),
        libraries=cuda_libraries.examine(),
        probe=probe.look(),
    )
    return "\n".join(map(str, missing_gpus.advise(facts))) if facts.gpus else ""


def _print_facts(facts: Facts) -> None:
    for title, rows in (
        ("Machine", _machine(facts.machine)),
        ("Ports", _ports(facts.ports)),
        ("Devices", _devices(facts)),
        ("CUDA libraries", _libraries(facts)),
        ("Computation", _computations(facts)),
    ):
        lines = [f"  {name:18} {value}" for name, value in rows]
        if lines:
            print(title, *lines, "", sep="\n")


def _machine(found: machine.Machine) -> _Rows:
    for name, version in found.versions.items():
        yield name, version or "not installed"
    wsl, container = ", in WSL" * found.wsl, ", in a container" * found.container
    yield "system", f"{found.platform}{wsl}{container}"
    processor, memory = found.processor, found.memory
    yield "processor", processor.model
    yield "cores", f"{processor.usable:g} usable of {processor.cores}"
    yield "memory", f"{_size(memory.available)} available of {_size(memory.total)}"
    for folder in found.folders:
        writable = "writable" if folder.writable else "NOT writable"
        yield folder.purpose, f"{folder.path}: {_size(folder.free)} free, {writable}"


def _size(count: int | None) -> str:
    return "not known" if count is None else f"{count / GIGABYTE:.1f} GB"


def _ports(found: machine.Ports) -> _Rows:
    if not found.ports:
        yield "TF_CONFIG", found.error or "not set: this machine trains alone"
    for port in found.ports:
        state = "free for this worker" if port.local else "answers"
        yield port.address, port.error or state


def _devices(facts: Facts) -> _Rows:
    hardware, tensorflow = facts.nvidia, facts.probe
    yield "on the PCI bus", ", ".join(hardware.pci) or "no NVIDIA GPU"
    yield "nvidia-smi", hardware.smi_error or f"{len(hardware.gpus)} GPUs"
    for gpu in hardware.gpus:
        yield gpu.name, f"driver {gpu.driver}, {gpu.used} of {gpu.memory} in use"
    if hardware.visible_devices is not None:
        yield "visible to CUDA", hardware.visible_devices or "(none)"
    if tensorflow.error:
        yield "TensorFlow", f"does not start: {tensorflow.error}"
        return
    versions = f"CUDA {tensorflow.cuda or 'none'}, cuDNN {tensorflow.cudnn or 'none'}"
    capabilities = " ".join(tensorflow.built_for) or "none"
    yield "TensorFlow is for", f"{versions}, compute capability {capabilities}"
    yield "TensorFlow finds", f"{len(tensorflow.gpus)} GPUs"
    for device in tensorflow.gpus:
        capability = device.capability or "not known"
        yield device.name, f"{device.model}, compute capability {capability}"


def _libraries(facts: Facts) -> _Rows:
    for library in facts.libraries:
        version = f"{library.version}, " if library.version else ""
        shadows = ", before the wheel's" if library.shadows_wheel else ""
        state = f"{version}{library.place}: {library.path}{shadows}"
        if library.error:
            # The message repeats the name.
            state = f"NOT loaded: {library.error.removeprefix(f'{library.name}: ')}"
        yield library.name, "not found" if "No such file" in state else state


def _computations(facts: Facts) -> _Rows:
    for computation in facts.probe.computations:
        name = f"{computation.device} {'XLA' if computation.xla else 'plain'}"
        result = f"ok in {computation.ms:.0f} ms, with compilation"
        if computation.error:
            result = f"FAILED: {computation.error}"
        yield name, f"{computation.operation}: {result}"
