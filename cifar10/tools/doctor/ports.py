"""The ports of a training on several machines, as TF_CONFIG gives them."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping

from cifar10.distributed import cluster
from cifar10.errors import UsageError, reason

_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of the cluster.

    Attributes:
        address: `host:port`, as TF_CONFIG names it.
        own: Whether it is this worker's.
        error: Why it cannot be used, or does not answer; empty if it is fine.
    """

    address: str
    own: bool
    error: str


@dataclasses.dataclass(frozen=True)
class Ports:
    """What TF_CONFIG says.

    Attributes:
        configured: Whether it names several workers.
        error: Why it makes no sense; empty if it does.
        ports: The workers' ports.
    """

    configured: bool
    error: str = ""
    ports: tuple[Port, ...] = ()


def look(environ: Mapping[str, str] = os.environ, seconds: float = _SECONDS) -> Ports:
    """Tries this worker's port and calls the others.

    Args:
        environ: Environment variables.
        seconds: How long to wait for another worker.
    """
    text = environ.get(cluster.TF_CONFIG, "")
    try:
        found = cluster.from_environment({cluster.TF_CONFIG: text})
    except UsageError as error:
        return Ports(configured=True, error=str(error))
    if found is None:
        return Ports(configured=False)
    tried = [
        Port(
            worker.address,
            own=worker is found.this_worker,
            error=_bind(worker)
            if worker is found.this_worker
            else _call(worker, seconds),
        )
        for worker in found.workers
    ]
    return Ports(configured=True, ports=tuple(tried))


def _bind(worker: cluster.Worker) -> str:
    _, port = worker.host_and_port
    with socket.socket() as own:
        # A connection that has just ended does not keep a server from starting.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except OSError as error:
            return reason(error)
    return ""


def _call(worker: cluster.Worker, seconds: float) -> str:
    try:
        socket.create_connection(worker.host_and_port, timeout=seconds).close()
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, UnicodeError) as error:
        return reason(error)
    return ""
