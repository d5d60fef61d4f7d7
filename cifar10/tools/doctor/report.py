"""Finds out everything and says it: the report, JSON, and the short form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

from cifar10.tools.doctor import (
    advice,
    gpu_advice,
    libraries,
    machine,
    nvidia,
    ports,
    probe,
)
from cifar10.tools.doctor.facts import Advice, Facts
from cifar10.towers import hardware

_WIDTH = 18


def run(
    folders: Mapping[str, str], *, seconds: float, compute: bool, as_json: bool
) -> int:
    """Prints what is found, and advice.

    Args:
        folders: Path of a folder that a training uses, by purpose.
        seconds: How long each computation may take.
        compute: Whether to compute.
        as_json: Whether to print one JSON object instead of lines.

    Returns:
        The exit code: 1 if something is broken, else 0.
    """
    found, cluster = machine.look(folders), ports.look()
    if not as_json:
        print(_machine(found), _ports(cluster), sep="\n")
        limit = f", at most {seconds:g} s a computation" if compute else ""
        print(f"(TensorFlow starts in another process{limit}.)\n", flush=True)
    facts = Facts(
        machine=found,
        ports=cluster,
        nvidia=nvidia.look(),
        libraries=libraries.look(),
        probe=probe.run(seconds, compute=compute),
    )
    advised = advice.advise(facts)
    broken = any(one.broken for one in advised)
    if as_json:
        print(_json(facts, advised, broken=broken))
        return int(broken)
    print(_devices(facts), _libraries(facts.libraries), sep="\n")
    if facts.probe.computations:
        print(_computations(facts.probe))
    print(*advised, *([] if broken else ["No problem was found."]), sep="\n")
    return int(broken)


def short_form() -> str:
    """Returns why TensorFlow finds fewer GPUs than there are, a line for each cause.

    It computes nothing, and asks the TensorFlow of this process. Where nothing is known
    to be wrong it returns an empty text.
    """
    facts = Facts(
        machine=machine.look({}),
        ports=ports.Ports(configured=False),
        nvidia=nvidia.look(),
        libraries=libraries.Libraries(),
        probe=probe.Probe(probe.view()),
    )
    if not facts.gpus:
        return ""
    facts = dataclasses.replace(facts, libraries=libraries.look())
    return "\n".join(map(str, gpu_advice.why_not_found(facts)))


def _json(facts: Facts, advised: Iterable[Advice], *, broken: bool) -> str:
    content = {
        "ok": not broken,
        "advice": [dataclasses.asdict(one) for one in advised],
        **dataclasses.asdict(facts),
    }
    return json.dumps(content, indent=2)


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns a title and lines of a name and a value."""
    lines = (f"  {name:{_WIDTH}} {value}" for name, value in rows)
    return "\n".join([title, *lines, ""])


def _machine(found: machine.Machine) -> str:
    where = [found.platform]
    where += ["in WSL"] if found.wsl else []
    where += ["in a container"] if found.container else []
    processor = found.processor
    features = "not known" if processor.features is None else "none of these"
    missing = [
        name for name in hardware.FEATURES if name not in (processor.features or ())
    ]
    return "\n".join(
        [
            _section(
                "Versions",
                [
                    *(
                        (name, version or "not installed")
                        for name, version in found.versions.items()
                    ),
                    ("system", ", ".join(where)),
                ],
            ),
            _section(
                "Processor",
                [
                    ("model", processor.model),
                    ("cores", f"{processor.usable:g} usable of {processor.cores}"),
                    ("features", " ".join(processor.features or ()) or features),
                    ("without", " ".join(missing) if processor.features else features),
                ],
            ),
            _section(
                "Memory",
                [
                    ("available", _size(found.memory.available)),
                    ("of", _size(found.memory.total)),
                ],
            ),
            _section("Disk", ((one.purpose, _folder(one)) for one in found.folders)),
        ]
    )


def _folder(folder: machine.Folder) -> str:
    writable = "writable" if folder.writable else "NOT writable"
    return f"{folder.path}: {_size(folder.free)} free, {writable}"


def _size(count: int | None) -> str:
    return "not known" if count is None else f"{count / 10**9:.1f} GB"


def _ports(found: ports.Ports) -> str:
    if not found.configured:
        return _section("Ports", [("TF_CONFIG", "not set: this machine trains alone")])
    if found.error:
        return _section("Ports", [("TF_CONFIG", found.error)])
    return _section(
        "Ports",
        (
            (
                port.address,
                port.error or ("free for this worker" if port.own else "answers"),
            )
            for port in found.ports
        ),
    )


def _devices(facts: Facts) -> str:
    found, view = facts.nvidia, facts.probe.view
    rows = [
        ("on the PCI bus", ", ".join(found.pci) or "nothing of NVIDIA"),
        (
            "in /dev",
            ", ".join(
                path if usable else f"{path} (NOT permitted)"
                for path, usable in found.device_files.items()
            )
            or "nothing of NVIDIA",
        ),
        ("driver", found.driver or "none"),
        ("nvidia-smi", found.smi_error or f"{len(found.gpus)} GPUs"),
    ]
    for gpu in found.gpus:
        used = f"{_size(gpu.used)} of {_size(gpu.memory)} in use"
        rows.append(("", f"{gpu.name}, {_capability(gpu.capability)}, {used}"))
    if found.visible_devices is not None:
        rows.append((nvidia.VISIBLE_DEVICES, found.visible_devices or "(empty)"))
    if view is None:
        rows.append(("TensorFlow", f"does not start: {facts.probe.error}"))
    else:
        built = f"CUDA {view.cuda}, cuDNN {view.cudnn}, {' '.join(view.built_for)}"
        rows.append(("TensorFlow is for", built if view.cuda else "no CUDA"))
        rows.append(("TensorFlow finds", f"{len(view.gpus)} GPUs"))
        rows += [
            (device.name, f"{device.model}, {_capability(device.capability)}")
            for device in view.gpus
        ]
    return _section("Devices", rows)


def _capability(capability: tuple[int, int] | None) -> str:
    number = ".".join(map(str, capability)) if capability else "not known"
    return f"compute capability {number}"


def _libraries(found: libraries.Libraries) -> str:
    rows = [(one.name, _library(one)) for one in found.found]
    installed = [
        f"{name.removeprefix('nvidia-').removesuffix('-cu12')} {version}"
        for name, version in found.wheels.items()
        if version
    ]
    wheels = ", ".join(installed) or "none"
    return _section("CUDA libraries", [*rows, ("wheels of NVIDIA", wheels)])


def _library(library: libraries.Library) -> str:
    if library.error:
        # It begins with the name again.
        error = library.error.removeprefix(f"{library.name}: ")
        return "not found" if "No such file" in error else f"NOT loaded: {error}"
    version = f"{library.version}, " if library.version else ""
    shadows = ", before the wheel's" if library.place == "LD_LIBRARY_PATH" else ""
    return f"{version}{library.place}: {library.path}{shadows}"


def _computations(tried: probe.Probe) -> str:
    return _section(
        "Computation",
        (
            (
                f"{one.device} {'XLA' if one.xla else 'plain'}",
                f"{one.operation}: "
                + (
                    f"FAILED: {one.error}"
                    if one.error
                    else f"ok, {one.ms:.1f} ms (the first time {one.first_ms:.0f} ms)"
                ),
            )
            for one in tried.computations
        ),
    )
