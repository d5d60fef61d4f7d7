"""Where and with what was measured: what every table of speeds has to say."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cifar10.towers import hardware

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tensorflow", "keras", "numpy", "torch")
UNKNOWN = "unknown"


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
    return next(names, platform.processor() or UNKNOWN)


def native_bfloat16() -> list[str]:
    """Returns the processor's own instructions for bfloat16."""
    return hardware.bfloat16_features()


def accelerators() -> list[str]:
    """Returns the names of the NVIDIA GPUs that programs may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    return _output(query).splitlines()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of Python and of the rivals' packages, without a load."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit(root: Path = ROOT) -> str:
    """Returns the commit of a checkout, marked "-dirty" if files differ from it.

    Args:
        root: The checkout's own root; elsewhere the commit is "unknown".
    """
    git = shutil.which("git")
    if not git:
        return UNKNOWN
    within = [git, "-C", str(root)]
    # An unpacked archive may lie within someone else's repository.
    if Path(_output([*within, "rev-parse", "--show-toplevel"])) != root:
        return UNKNOWN
    return _output([*within, "describe", "--always", "--dirty"]) or UNKNOWN


def _output(command: list[str]) -> str:
    """Returns what a command prints, nothing if it fails."""
    done = subprocess.run(  # noqa: S603 - commands of our own.
        command, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
