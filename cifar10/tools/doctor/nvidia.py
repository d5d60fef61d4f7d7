"""What there is of NVIDIA: GPUs, the driver, and the program that asks it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cifar10.towers.hardware import ROOT, lines

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"

# Windows puts its NVIDIA driver here for the Linux beside it.
_WSL_LIBRARY = "usr/lib/wsl/lib/libcuda.so.1"
_WSL_SMI = "usr/lib/wsl/lib/nvidia-smi"

_QUERY = (
    "--query-gpu=name,driver_version,compute_cap,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
# It asks the driver, and waits as long as a broken one does.
_SMI_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that the driver knows.

    Attributes:
        name: As NVIDIA sells it.
        capability: Compute capability, (9, 0) for Hopper; None if not known.
        memory: Bytes; None if not known.
        used: Bytes in use; None if not known.
    """

    name: str
    capability: tuple[int, int] | None
    memory: int | None
    used: int | None


@dataclasses.dataclass(frozen=True)
class Nvidia:
    """What `look` found.

    Attributes:
        pci: Addresses of NVIDIA's GPUs on the PCI bus; the host's in a container.
        device_files: `/dev/nvidia0` and so on, and whether we may use them.
        driver: Version of the driver, empty without one.
        wsl_driver: Whether Windows lends its driver.
        gpus: What the driver knows, as nvidia-smi says.
        smi_error: Why nvidia-smi says nothing; empty if it answered.
        visible_devices: The environment variable; None if it is not set.
    """

    pci: tuple[str, ...] = ()
    device_files: dict[str, bool] = dataclasses.field(default_factory=dict)
    driver: str = ""
    wsl_driver: bool = False
    gpus: tuple[Gpu, ...] = ()
    smi_error: str = ""
    visible_devices: str | None = None

    @property
    def hidden(self) -> bool:
        """Whether all GPUs are hidden from CUDA, as one does on purpose."""
        return self.visible_devices is not None and (
            self.visible_devices.strip() in ("", "-1")
        )


def look(
    root: Path = ROOT,
    environ: Mapping[str, str] = os.environ,
    smi: Sequence[str] | None = None,
) -> Nvidia:
    """Looks for NVIDIA's GPUs and their driver.

    Args:
        root: Where the system's files are.
        environ: Environment variables.
        smi: Command of nvidia-smi; None to look for it.
    """
    gpus, version, error = _ask_smi(smi or _find_smi(root))
    module = "".join(lines(root / "proc/driver/nvidia/version")[:1])
    loaded = re.search(r"\b\d+\.\d+(\.\d+)?\b", module)
    return Nvidia(
        pci=_on_the_bus(root / "sys/bus/pci/devices"),
        device_files={
            str(path): os.access(path, os.R_OK | os.W_OK)
            for path in sorted((root / "dev").glob("nvidia[0-9]*"))
        },
        driver=loaded.group() if loaded else version,
        wsl_driver=(root / _WSL_LIBRARY).exists(),
        gpus=gpus,
        smi_error=error,
        visible_devices=environ.get(VISIBLE_DEVICES),
    )


def _on_the_bus(devices: Path) -> tuple[str, ...]:
    try:
        found = sorted(devices.iterdir())
    except OSError:
        return ()
    return tuple(
        device.name
        for device in found
        if "".join(lines(device / "vendor")).strip() == _VENDOR
        and "".join(lines(device / "class")).startswith(_DISPLAY_CLASS)
        # One that was lent to a virtual machine is not ours.
        and (device / "driver").resolve().name != "vfio-pci"
    )


def _find_smi(root: Path) -> list[str]:
    found = shutil.which("nvidia-smi")
    if not found and (root / _WSL_SMI).exists():
        found = str(root / _WSL_SMI)
    return [found] if found else []


def _ask_smi(command: Sequence[str]) -> tuple[tuple[Gpu, ...], str, str]:
    """Returns GPUs, the driver's version and what went wrong."""
    if not command:
        return (), "", "not installed"
    try:
        ended = subprocess.run(  # noqa: S603 - the driver's own program.
            [*command, *_QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), "", f"no answer within {_SMI_SECONDS} s"
    except OSError as error:
        return (), "", str(error)
    if ended.returncode:
        said = (ended.stdout + ended.stderr).strip() or f"exit code {ended.returncode}"
        return (), "", " ".join(said.split())
    rows = [
        [field.strip() for field in line.split(",")]
        for line in ended.stdout.splitlines()
        if line.count(",") == 4
    ]
    gpus = tuple(
        Gpu(name, _capability(capability), _bytes(memory), _bytes(used))
        for name, _, capability, memory, used in rows
    )
    return gpus, rows[0][1] if rows else "", ""


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if (major + minor).isdecimal() and minor else None


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * 2**20 if mebibytes.isdecimal() else None
