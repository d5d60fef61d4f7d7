"""This machine's free memory, and the types in which it computes natively."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

# What Linux calls the instructions that multiply bfloat16: vectors, and matrix tiles.
_BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")

# Ampere; the first NVIDIA GPUs whose tensor cores take bfloat16.
_NATIVE_CAPABILITY = (8, 0)

# Above `proc` and `sys`; tests put a made-up machine below another folder.
ROOT = Path("/")


def bfloat16_features() -> list[str]:
    """Returns the processor's instructions that multiply bfloat16."""
    found = re.search(r"^flags\s*:(.*)", _text(ROOT / "proc/cpuinfo"), re.MULTILINE)
    flags = found[1].split() if found else []
    return [name for name in _BFLOAT16_FEATURES if name in flags]


def available_memory() -> int | None:
    """Returns how many bytes this process may still take; None if that is not known.

    The limits of its container are taken into account.
    """
    found = re.search(r"MemAvailable: +(\d+) kB", _text(ROOT / "proc/meminfo"))
    if not found:
        return None
    return min([int(found[1]) * 1024, *_left_by_control_groups()])


def _left_by_control_groups() -> Iterator[int]:
    """Yields the memory left by the limits of this process's group and its parents."""
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 1 has a tree for each controller, version 2 one tree for all.
        tree = ROOT / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = tree / path.strip("/")
        for group in (inner, *inner.parents):
            limit, usage = (
                _text(group / f"memory.{new}")
                or _text(group / f"memory.{old}_in_bytes")
                for new, old in (("max", "limit"), ("current", "usage"))
            )
            if not (limit.isdecimal() and usage.isdecimal()):
                continue
            # The group caches what it read from files, but can do without.
            statistics = _text(group / "memory.stat")
            cached = re.findall(r"inactive_file (\d+)", statistics)
            yield max(0, int(limit) - int(usage) + max(map(int, cached), default=0))


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
    return bool(bfloat16_features())


def emulation_warning(precision: str, devices: Sequence[str]) -> str:
    """Returns a warning if the devices emulate the precision; else an empty string."""
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
