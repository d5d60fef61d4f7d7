"""Describes the machine, versions and commit with which speeds were measured."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from cifar10 import hardware

ROOT = Path(__file__).resolve().parent.parent
_POWERCAP = Path("/sys/class/powercap")
_PACKAGES = ("tensorflow", "keras", "numpy", "torch", "jax", "jaxlib", "flax", "optax")


def describe() -> dict[str, object]:
    """Returns processor, cores, versions, commit and date, for people and for JSON."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "processor": processor(),
        "cores": cores(),
        "accelerators": accelerators(),
        "bfloat16": hardware.bfloat16_features(),
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
    # An unpacked archive may lie within someone else's repository.
    if git("rev-parse", "--show-toplevel") != str(ROOT):
        return "unknown"
    return git("describe", "--always", "--dirty") or "unknown"


def git(*words: str) -> str:
    """Returns what git prints in the checkout, nothing if it fails or is absent."""
    return _output("git", "-C", str(ROOT), *words)


class Energy:
    """Measures the energy of the processors from its construction, if Linux shows it.

    Linux's counters (RAPL) can often be read only by root.
    """

    def __init__(self) -> None:
        names = _POWERCAP.glob("intel-rapl:*/name")
        packages = [one for one in names if one.read_text().startswith("package")]
        files = [one.with_name("energy_uj") for one in packages]
        self._files = [one for one in files if os.access(one, os.R_OK)]
        self._before = self._read("energy_uj")
        self._ranges = self._read("max_energy_range_uj")
        self._used = 0

    def joules(self) -> float | None:
        """Returns the joules used so far, or None if no counter can be read.

        Call it every minute: at 500 W, a counter may overflow after two minutes.
        """
        now = self._read("energy_uj")
        for new, old, most in zip(now, self._before, self._ranges, strict=True):
            self._used += (new - old) % most
        self._before = now
        return self._used / 1e6 if now else None

    def _read(self, name: str) -> list[int]:
        return [int(one.with_name(name).read_text()) for one in self._files]


def _output(*command: str) -> str:
    """Returns what a command prints, nothing if it fails or is absent."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(  # noqa: S603 - commands of our own.
        command, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
