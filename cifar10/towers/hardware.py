"""The processor and the memory of this machine, within the limits of its container.

What cannot be found out is None or empty; a missing file is no error.
"""

import dataclasses
import os
import platform
from collections.abc import Iterator
from pathlib import Path

# What Linux calls the instructions that multiply bfloat16: vectors, and matrix tiles.
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")
# What TensorFlow needs on x86-64, and what makes it fast.
FEATURES = ("avx", "avx2", "fma", "avx512f", *BFLOAT16_FEATURES)

# Above `proc` and `sys`; tests put a made-up machine below another folder.
ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Processor:
    """The processor."""

    model: str
    cores: int  # Logical ones.
    usable: float  # Of these, how many this process may keep busy.
    features: tuple[str, ...] | None  # Of `FEATURES`; None if that is not known.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of memory, within the limits of the container; None if not known."""

    total: int | None
    available: int | None


def processor() -> Processor:
    """Describes the processor, and how much of it this process may use."""
    first: dict[str, str] = {}
    for line in _text(ROOT / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    flags = first.get("flags", "").split()
    cores = usable = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS has no such function.
        usable = len(os.sched_getaffinity(0))
    return Processor(
        model=first.get("model name") or platform.processor() or "unknown",
        cores=cores,
        usable=min([usable, *_processor_limits()]),
        features=tuple(name for name in FEATURES if name in flags) if flags else None,
    )


def _processor_limits() -> Iterator[float]:
    for group in _control_groups("cpu"):
        numbers = _text(group / "cpu.max").split() or [
            _text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")
        ]
        if all(number.isdecimal() for number in numbers):
            quota, period = map(int, numbers)
            yield quota / period


def memory() -> Memory:
    """Returns how much memory there is for this process."""
    sizes = {}
    for line in _text(ROOT / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        kibibytes = value.removesuffix("kB").strip()
        if kibibytes.isdecimal():
            sizes[key] = int(kibibytes) * 1024
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    for limit, unused in _memory_limits():
        total = None if total is None else min(total, limit)
        available = None if available is None else min(available, unused)
    return Memory(total, available)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yields the limit of each control group, and what is left of it."""
    for group in _control_groups("memory"):
        limit = _text(group / "memory.max")
        usage = _text(group / "memory.current")
        if not limit:
            limit = _text(group / "memory.limit_in_bytes")
            usage = _text(group / "memory.usage_in_bytes")
        if not limit.isdecimal():
            continue
        # The group caches what it read from files, but can do without.
        statistics = _text(group / "memory.stat").splitlines()
        entries = dict(line.split(" ", 1) for line in statistics)
        cached = entries.get("total_inactive_file") or entries.get("inactive_file", "0")
        used = int(usage) - int(cached) if usage.isdecimal() else 0
        yield int(limit), max(0, int(limit) - used)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those around it."""
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 has a tree for each controller, version 2 one tree for all.
        tree = ROOT / "sys/fs/cgroup" / (controller if controllers else "")
        group = tree / path.strip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(tree))


def _text(path: Path) -> str:
    """Returns the text of a file, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
