"""The machine without its GPUs: versions, processor, memory, folders.

Every function reads below a `root` that tests replace, and none fails where a file is
missing: what cannot be found out is None or empty.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from cifar10.towers import hardware

PACKAGE = "cifar10-multi-gpu"
_PACKAGES = ("tensorflow", "keras", "numpy", PACKAGE)


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder that a training writes to or reads from.

    Attributes:
        purpose: What it is for.
        path: The folder, there or not.
        free: Free bytes; None if not known.
        writable: Whether files can be made in it, and it itself if it is missing.
        holds_files: Whether there is something in it.
    """

    purpose: str
    path: str
    free: int | None
    writable: bool
    holds_files: bool


@dataclasses.dataclass(frozen=True)
class Machine:
    """What `look` found; `versions` has an empty text for what is not installed."""

    system: str
    platform: str
    architecture: str
    wsl: bool
    container: bool
    versions: dict[str, str]
    processor: hardware.Processor
    memory: hardware.Memory
    folders: tuple[Folder, ...]


def look(
    folders: Mapping[str, str | None],
    root: Path = hardware.ROOT,
    environ: Mapping[str, str] = os.environ,
) -> Machine:
    """Looks at the machine.

    Args:
        folders: Path of a folder, by purpose; one for temporary files is added.
        root: Where the system's files are.
        environ: Environment variables.
    """
    return Machine(
        system=platform.system(),
        platform=platform.platform(),
        architecture=platform.machine(),
        wsl=_is_wsl(root),
        container=_is_container(root, environ),
        versions=_versions(),
        processor=hardware.processor(root),
        memory=hardware.memory(root),
        folders=tuple(
            _folder(purpose, path)
            for purpose, path in {
                **folders,
                "temporary files": _temporary_folder(),
            }.items()
        ),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _is_wsl(root: Path) -> bool:
    return any(
        "microsoft" in line.lower() for line in hardware.lines(root / "proc/version")
    )


def _is_container(root: Path, environ: Mapping[str, str]) -> bool:
    if "KUBERNETES_SERVICE_HOST" in environ or "container" in environ:
        return True
    if any((root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    groups = " ".join(hardware.lines(root / "proc/1/cgroup"))
    return any(name in groups for name in ("docker", "kubepods", "lxc"))


def _folder(purpose: str, path: str | None) -> Folder:
    if path is None:
        return Folder(purpose, "none", None, writable=False, holds_files=False)
    # As the user named it: links stay as they are, and an unknown ~user too.
    folder = Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111
    there = folder
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
    except OSError:  # No folder can have such a name.
        return Folder(purpose, str(folder), None, writable=False, holds_files=False)
    try:
        holds_files = any(folder.iterdir())
    except OSError:
        holds_files = False
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(purpose, str(folder), free, writable, holds_files)


def _temporary_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except OSError:  # None of the usual ones can be written to.
        return None
