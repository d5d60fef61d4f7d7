"""NVIDIA's GPUs: those on the bus, and those that the driver knows."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator

from cifar10.towers import hardware

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
# Where Windows puts its driver's files for WSL.
_WSL_FOLDER = "/usr/lib/wsl/lib"
_QUERY = (
    "--query-gpu=name,driver_version,memory.total,memory.used,compute_cap",
    "--format=csv,noheader",
)
# nvidia-smi waits as long as a broken driver does.
_SMI_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, in the words of nvidia-smi: `NVIDIA H200`, `570.1.2`, `9.0`."""

    name: str
    driver: str
    memory: str
    used: str
    capability: str


@dataclasses.dataclass(frozen=True)
class Nvidia:
    """The GPUs of this machine, and what hides them."""

    pci: tuple[str, ...] = ()  # On the bus; in a container the host's.
    gpus: tuple[Gpu, ...] = ()  # Those of nvidia-smi.
    smi_error: str = ""  # Why nvidia-smi lists none.
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, if it is set.


def examine() -> Nvidia:
    """Looks for NVIDIA's GPUs, and asks the driver for them."""
    gpus, error = _ask_the_driver()
    return Nvidia(
        pci=tuple(_on_the_bus()),
        gpus=gpus,
        smi_error=error,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _on_the_bus() -> Iterator[str]:
    for device in sorted((hardware.ROOT / "sys/bus/pci/devices").glob("*")):
        vendor = (device / "vendor").read_text(encoding="ascii").strip()
        device_class = (device / "class").read_text(encoding="ascii")
        if vendor == _NVIDIA and device_class.startswith(_DISPLAY_CLASS):
            yield device.name


def _ask_the_driver() -> tuple[tuple[Gpu, ...], str]:
    """Returns the GPUs that nvidia-smi lists, and why it lists none."""
    search_path = os.environ.get("PATH", os.defpath)
    command = shutil.which("nvidia-smi", path=f"{search_path}:{_WSL_FOLDER}")
    if not command:
        return (), "not installed"
    try:
        process = subprocess.run(  # noqa: S603 - the driver's own program.
            [command, *_QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"no answer within {_SMI_SECONDS:g} s"
    if process.returncode:
        message = " ".join((process.stdout + process.stderr).split())
        return (), message or f"exit code {process.returncode}"
    rows = [line.split(", ") for line in process.stdout.splitlines()]
    return tuple(Gpu(*row) for row in rows), ""
