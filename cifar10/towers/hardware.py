"""The processor and the memory of this machine, within the limits of its container.

Every function reads below a `root` that tests replace, and none fails where a file is
missing: what cannot be found out is None or empty.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator
from pathlib import Path

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


def processor(root: Path = ROOT) -> Processor:
    """Returns which processor there is, and how much of it for this process."""
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


def lines(path: Path) -> list[str]:
    """Returns the lines of a file, none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
