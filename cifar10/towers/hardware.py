"""The processor, the memory and the native types of arithmetic of this machine.

Processor and memory are those within the limits of its container.

What cannot be found out is None or empty; a missing file is no error.
"""

import dataclasses
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

# What Linux calls the instructions that multiply bfloat16: vectors, and matrix tiles.
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")

# Ampere; the first NVIDIA GPUs whose tensor cores take bfloat16.
_NATIVE_CAPABILITY = (8, 0)

# Above `proc` and `sys`; tests put a made-up machine below another folder.
ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Processor:
    """The processor."""

    model: str
    cores: int  # Logical ones.
    usable: float  # Of these, how many this process may keep busy.
    features: tuple[str, ...]  # Of `BFLOAT16_FEATURES`.


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
        features=tuple(name for name in BFLOAT16_FEATURES if name in flags),
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


def resolve_precision(
    requested: str, devices: Sequence[str], *, deterministic: bool = False
) -> str:
    """Chooses the precision of a run: the type of convolutions and matrix products.

    Variables, loss, softmax and batch statistics are float32 in every precision below
    float64.

    `auto` is bfloat16 where every device has it natively, else float32. It is float32
    in a `deterministic` run, because bfloat16 is emulated without oneDNN.
    """
    if requested != "auto":
        return requested
    return "bfloat16" if has_bfloat16(devices) and not deterministic else "float32"


def has_bfloat16(devices: Sequence[str]) -> bool:
    """Returns whether all devices multiply bfloat16 natively."""
    import tensorflow as tf

    if _on_gpus(devices):
        capabilities = [
            tf.config.experimental.get_device_details(gpu).get("compute_capability")
            for gpu in tf.config.get_visible_devices("GPU")
        ]
        return all(
            capability is not None and capability >= _NATIVE_CAPABILITY
            for capability in capabilities
        )
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return False  # TensorFlow's own kernels do not use these instructions.
    return bool(processor().features)


def emulation_warning(precision: str, devices: Sequence[str]) -> str:
    """Returns a warning if devices of this kind emulate a precision, else nothing."""
    if precision == "bfloat16":
        native = has_bfloat16(devices)
    else:
        native = precision != "float16" or _on_gpus(devices)
    if native:
        return ""
    return (
        f"WARNING: --precision {precision} is usually emulated on such devices, and\n"
        "then slower than float32. --precision auto chooses the fastest."
    )


def _on_gpus(devices: Sequence[str]) -> bool:
    return any("gpu" in device.lower() for device in devices)
