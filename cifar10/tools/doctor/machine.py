"""The machine apart from its GPUs: versions, processor, memory, folders, ports."""

import dataclasses
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping
from importlib import metadata

from cifar10.config import layout
from cifar10.distributed import cluster
from cifar10.errors import UsageError, reason
from cifar10.towers import hardware

_PACKAGES = ("tensorflow", "keras", "numpy", "cifar10-multi-gpu")
_WORKER_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder that a training uses, whether or not it exists.

    It has `free` bytes, and is `writable` if it can be created or files in it can be.
    """

    purpose: str
    path: str
    free: int
    writable: bool


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine; `versions` has an empty text for a package that is not installed."""

    platform: str
    wsl: bool
    container: bool
    versions: dict[str, str]
    processor: hardware.Processor
    memory: hardware.Memory
    folders: tuple[Folder, ...]


@dataclasses.dataclass(frozen=True)
class Port:
    """The port of this worker (`local`) or another; no error if it can be used."""

    address: str
    local: bool
    error: str


@dataclasses.dataclass(frozen=True)
class Ports:
    """The workers' ports, none on a single machine; or what is wrong in `TF_CONFIG`."""

    error: str = ""
    ports: tuple[Port, ...] = ()


def examine(folders: Mapping[str, str]) -> Machine:
    """Examines this machine; `folders` are paths by purpose."""
    folders = {**folders, "temporary files": tempfile.gettempdir()}
    container_files = (".dockerenv", "run/.containerenv")
    return Machine(
        platform=platform.platform(),
        wsl="microsoft" in platform.release().lower(),
        container="KUBERNETES_SERVICE_HOST" in os.environ
        or "container" in os.environ
        or any((hardware.ROOT / name).exists() for name in container_files),
        versions=_versions(),
        processor=hardware.processor(),
        memory=hardware.memory(),
        folders=tuple(_folder(purpose, path) for purpose, path in folders.items()),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _folder(purpose: str, path: str) -> Folder:
    folder = layout.absolute_path(path)
    existing = next(filter(os.path.exists, (folder, *folder.parents)))
    return Folder(
        purpose,
        path=str(folder),
        free=shutil.disk_usage(existing).free,
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
    )


def examine_ports() -> Ports:
    """Opens this worker's port of `TF_CONFIG`, and connects to the others' ports."""
    text = os.environ.get(cluster.TF_CONFIG, "")
    try:
        found = cluster.from_environment({cluster.TF_CONFIG: text})
    except UsageError as error:
        # The advice has a fix of its own in the place of the error's second line.
        return Ports(error=str(error).splitlines()[0].rstrip("."))
    if found is None:
        return Ports()
    ports = [
        _port(worker, local=index == found.index)
        for index, worker in enumerate(found.workers)
    ]
    return Ports(ports=tuple(ports))


def _port(worker: cluster.Worker, *, local: bool) -> Port:
    host, port = worker.host_and_port
    error = ""
    try:
        if local:
            with socket.socket() as server:
                # A connection that has just ended does not keep a server from starting.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", port))
        else:
            socket.create_connection((host, port), timeout=_WORKER_SECONDS).close()
    except (OSError, UnicodeError) as failure:
        error = reason(failure)
    return Port(worker.address, local, error)
