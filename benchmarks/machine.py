"""Where and with what was measured: what every table of speeds has to say."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from cifar10.towers import hardware

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("tensorflow", "keras", "numpy", "torch", "jax", "jaxlib", "flax", "optax")


def describe() -> dict[str, object]:
    """Returns processor, cores, versions, commit and date, for people and for JSON."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "processor": processor(),
        "cores": cores(),
        "accelerators": accelerators(),
        "bfloat16": native_bfloat16(),
        "versions": versions(),
    }


def cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def native_bfloat16() -> list[str]:
    """Returns the processor's own instructions for bfloat16."""
    return hardware.bfloat16_features()


def accelerators() -> list[str]:
    """Returns the names of the NVIDIA GPUs that programs may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return _output(*query).splitlines()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the rivals' packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Returns the checkout's commit, marked "-dirty" if files differ from it."""
    within = ("git", "-C", str(ROOT))
    # An unpacked archive may lie within someone else's repository.
    if _output(*within, "rev-parse", "--show-toplevel") != str(ROOT):
        return "unknown"
    return _output(*within, "describe", "--always", "--dirty") or "unknown"


def _output(*command: str) -> str:
    """Returns what a command prints, nothing if it fails or is absent."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(  # noqa: S603 - commands of our own.
        command, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
