"""The machine without its GPUs: versions, processor, memory, folders.

Every function reads below a `root` that tests replace, and none fails where a file is
missing: what cannot be found out is None or empty.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

PACKAGE = "cifar10-multi-gpu"
_PACKAGES = ("tensorflow", "keras", "numpy", PACKAGE)

# What TensorFlow needs on x86-64, and what makes it fast.
FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")

ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Processor:
    """The processor.

    Attributes:
        model: Its name.
        cores: Logical cores of the machine.
        usable: How many of them this process may keep busy.
        features: Those of `FEATURES` that it has; None if that is not known.
    """

    model: str
    cores: int
    usable: float
    features: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of memory, within the limits of the container; None if not known."""

    total: int | None
    available: int | None


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder that a training writes to or reads from.

    Attributes:
        purpose: What it is for.
        path: The folder, there or not.
        free: Free bytes; None if not known.
        writable: Whether files can be made in it, and it itself if it is missing.
        holds_files: Whether there is something in it.
    """

    purpose: str
    path: str
    free: int | None
    writable: bool
    holds_files: bool


@dataclasses.dataclass(frozen=True)
class Machine:
    """What `look` found; `versions` has an empty text for what is not installed."""

    system: str
    platform: str
    architecture: str
    wsl: bool
    container: bool
    versions: dict[str, str]
    processor: Processor
    memory: Memory
    folders: tuple[Folder, ...]


def look(
    folders: Mapping[str, str | None],
    root: Path = ROOT,
    environ: Mapping[str, str] = os.environ,
) -> Machine:
    """Looks at the machine.

    Args:
        folders: Path of a folder, by purpose; one for temporary files is added.
        root: Where the system's files are.
        environ: Environment variables.
    """
    return Machine(
        system=platform.system(),
        platform=platform.platform(),
        architecture=platform.machine(),
        wsl=_is_wsl(root),
        container=_is_container(root, environ),
        versions=_versions(),
        processor=_processor(root),
        memory=memory(root),
        folders=tuple(
            _folder(purpose, path)
            for purpose, path in {
                **folders,
                "temporary files": _temporary_folder(),
            }.items()
        ),
    )


def lines(path: Path) -> list[str]:
    """Returns the lines of a file, none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _is_wsl(root: Path) -> bool:
    return any("microsoft" in line.lower() for line in lines(root / "proc/version"))


def _is_container(root: Path, environ: Mapping[str, str]) -> bool:
    if "KUBERNETES_SERVICE_HOST" in environ or "container" in environ:
        return True
    if any((root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    groups = " ".join(lines(root / "proc/1/cgroup"))
    return any(name in groups for name in ("docker", "kubepods", "lxc"))


def _processor(root: Path) -> Processor:
    described: dict[str, str] = {}
    for line in lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        described.setdefault(key.strip(), value.strip())
    flags = described.get("flags", "").split()
    cores = os.cpu_count() or 1
    usable: float = cores
    if hasattr(os, "sched_getaffinity"):  # On Linux only.
        usable = len(os.sched_getaffinity(0))
    return Processor(
        model=described.get("model name") or platform.processor() or "unknown",
        cores=cores,
        usable=min([usable, *_processor_limits(root)]),
        features=tuple(name for name in FEATURES if name in flags) if flags else None,
    )


def _processor_limits(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        shares = "".join(lines(group / "cpu.max")).split()
        shares = shares or [
            "".join(lines(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period")
        ]
        if len(shares) == 2 and all(share.isdecimal() for share in shares):
            yield int(shares[0]) / int(shares[1])


def memory(root: Path = ROOT) -> Memory:
    """Returns how much memory there is for this process."""
    found = {}
    for line in lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdecimal():
            found[key] = int(number[0]) * 1024
    limits, rooms = [], []
    for group in _groups(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = "".join(lines(group / limit_name))
            usage = "".join(lines(group / usage_name))
            if limit.isdecimal():
                limits.append(int(limit))
                used = int(usage) - _reclaimable(group) if usage.isdecimal() else 0
                rooms.append(max(0, int(limit) - used))

    def limited(key: str, bounds: list[int]) -> int | None:
        return min([found[key], *bounds]) if key in found else None

    return Memory(
        total=limited("MemTotal", limits), available=limited("MemAvailable", rooms)
    )


def _reclaimable(group: Path) -> int:
    """Returns the bytes of files that a control group keeps but can do without."""
    entries = dict(line.split(" ", 1) for line in lines(group / "memory.stat"))
    return int(entries.get("total_inactive_file") or entries.get("inactive_file") or 0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those around it."""
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 has a tree for each controller, version 2 one for all.
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = base / path.strip("/")
        yield own
        yield from (group for group in own.parents if group.is_relative_to(base))


def _folder(purpose: str, path: str | None) -> Folder:
    if path is None:
        return Folder(purpose, "none", None, writable=False, holds_files=False)
    # As the user named it: links stay as they are, and an unknown ~user too.
    folder = Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111
    there = folder
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
    except OSError:  # No folder can have such a name.
        return Folder(purpose, str(folder), None, writable=False, holds_files=False)
    try:
        holds_files = any(folder.iterdir())
    except OSError:
        holds_files = False
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(purpose, str(folder), free, writable, holds_files)


def _temporary_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except OSError:  # None of the usual ones can be written to.
        return None
