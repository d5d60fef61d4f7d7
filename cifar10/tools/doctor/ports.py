"""The ports of a training on several machines, as `TF_CONFIG` gives them."""

from __future__ import annotations

import dataclasses
import os
import socket

from cifar10.distributed import cluster
from cifar10.errors import UsageError, reason

_SECONDS = 2.0


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


def examine() -> Ports:
    """Opens this worker's port, and connects to those of the other workers."""
    text = os.environ.get(cluster.TF_CONFIG, "")
    try:
        found = cluster.from_environment({cluster.TF_CONFIG: text})
    except UsageError as error:
        return Ports(error=str(error))
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
            socket.create_connection((host, port), timeout=_SECONDS).close()
    except TimeoutError:
        error = f"no answer within {_SECONDS:g} s"
    except (OSError, UnicodeError) as failure:
        error = reason(failure)
    return Port(worker.address, local, error)
