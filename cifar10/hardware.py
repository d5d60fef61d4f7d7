"""Detects this machine's processor, memory, GPUs and native bfloat16 support."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cifar10.errors import counted

# Instructions for which oneDNN and Eigen have kernels of their own, the widest first.
_INSTRUCTIONS = ("amx_bf16", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f")

_COUNT_GPUS = (
    "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); count = ctypes.c_int(); "
    "fails = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)); "
    "print(0 if fails else count.value)"
)

# The folder of `proc` and `sys`. Tests simulate other machines in another folder.
ROOT = Path("/")


def processor_features() -> list[str]:
    """Returns Linux's names of the processor's features; empty if unknown."""
    found = re.search(r"^flags\s*:(.*)", _text(ROOT / "proc/cpuinfo"), re.MULTILINE)
    return found[1].split() if found else []


def bfloat16_features() -> list[str]:
    """Returns the names of the processor's bfloat16 instructions."""
    return [one for one in processor_features() if one in ("avx512_bf16", "amx_bf16")]


def describe(*, on_gpus: bool) -> dict[str, str]:
    """Returns processor, cores and NVIDIA driver, which decide how sums round."""
    about, features = _text(ROOT / "proc/cpuinfo"), processor_features()
    name = re.search(r"^model name\s*: (.+)", about, re.MULTILINE)
    model = name[1] if name else platform.processor() or platform.machine()
    best = [one for one in _INSTRUCTIONS if one in features][:1]
    given = os.environ.get("TF_NUM_INTRAOP_THREADS", "0")  # Of TensorFlow.
    threads = int(given) if given.isdecimal() else 0
    cores = counted(threads or len(os.sched_getaffinity(0)), "core")
    found = {"processor": ", ".join([model, *best, cores])}
    driver = _text(ROOT / "proc/driver/nvidia/version") if on_gpus else ""
    if number := re.search(r"\d+\.[.\d]+", driver):
        found["driver"] = number[0]
    return found


def available_memory() -> int | None:
    """Returns how many bytes this process can still allocate; None if unknown.

    Takes the limits of a container into account, if it has control groups of version 2.
    """
    found = re.search(r"MemAvailable: +(\d+) kB", _text(ROOT / "proc/meminfo"))
    if not found:
        return None
    return min([int(found[1]) * 1024, *_left_by_control_groups()])


def count_gpus() -> int:
    """Returns how many NVIDIA GPUs CUDA shows to a new process; 0 without a driver.

    CUDA numbers GPUs from 0, even on WSL and in a container that has only /dev/nvidia3.
    A process that has asked before is not told that a GPU was lost.
    """
    with contextlib.suppress(subprocess.SubprocessError):
        command, quiet = [sys.executable, "-c", _COUNT_GPUS], subprocess.DEVNULL
        return int(subprocess.check_output(command, stderr=quiet, timeout=60))  # noqa: S603
    return 0


def _left_by_control_groups() -> Iterator[int]:
    """Yields the free bytes in this process's control group and each parent group."""
    found = re.search(r"^0::(.*)", _text(ROOT / "proc/self/cgroup"), re.MULTILINE)
    inner = ROOT / "sys/fs/cgroup" / (found[1].strip("/") if found else "")
    for group in (inner, *inner.parents):
        limit, usage = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdecimal() and usage.isdecimal():
            # Cached file contents count as used, but can be dropped.
            statistics = _text(group / "memory.stat")
            cached = re.search(r"^inactive_file (\d+)", statistics, re.MULTILINE)
            yield max(0, int(limit) - int(usage) + int(cached[1] if cached else 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def resolve_precision(
    requested: str, devices: Sequence[str], *, deterministic: bool = False
) -> str:
    """Chooses the dtype in which a run computes convolutions and matrix products.

    Except in float64, variables, loss, softmax and batch statistics are float32.
    `auto` chooses bfloat16 if every device supports it natively, else float32. If
    `deterministic`, it chooses float32: oneDNN is off, so CPUs would emulate bfloat16.
    """
    if requested != "auto":
        return requested
    if deterministic:
        return "float32"
    import tensorflow as tf

    # Without oneDNN, these instructions are unused.
    is_native = uses_onednn(by_default=True) and bool(bfloat16_features())
    if any("gpu" in device.lower() for device in devices):
        gpus = tf.config.get_visible_devices("GPU")
        details = map(tf.config.experimental.get_device_details, gpus)
        capabilities = [one.get("compute_capability") or (0, 0) for one in details]
        is_native = all(one >= (8, 0) for one in capabilities)  # Since Ampere.
    return "bfloat16" if is_native else "float32"


def uses_onednn(*, by_default: bool) -> bool:
    """Returns whether the environment turns oneDNN on, as TensorFlow reads it."""
    word = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").lower()
    return word in ("1", "true") or (by_default and word not in ("0", "false"))
