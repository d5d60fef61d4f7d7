"""The ports of a training on several machines: those that TF_CONFIG names."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping

from cifar10.errors import reason

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
        configured: Whether it is set.
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
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        return Ports(configured=False)
    try:
        workers, index = _parse(text)
    except ValueError as error:
        return Ports(configured=True, error=str(error))
    tried = [
        Port(
            address,
            own=number == index,
            error=_bind(address) if number == index else _call(address, seconds),
        )
        for number, address in enumerate(workers)
    ]
    return Ports(configured=True, ports=tuple(tried))


def _parse(text: str) -> tuple[list[str], int]:
    """Returns the addresses, a chief's first, and which of them is this worker's."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    try:
        jobs, task = content.get("cluster", {}), content.get("task", {})
        own = (task.get("type", "worker"), task.get("index", 0))
        workers = {
            (job, number): address
            for job in ("chief", "worker")
            for number, address in enumerate(jobs.get(job, []))
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(
            'it is not {"cluster": {"worker": ["host:port", ...]}, '
            '"task": {"type": "worker", "index": 0}}'
        ) from error
    for address in workers.values():
        _split(address)
    places = list(workers)
    if own not in places:
        raise ValueError(f"its task, {own[0]} {own[1]}, is not in its cluster")
    return list(workers.values()), places.index(own)


def _split(address: object) -> tuple[str, int]:
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"its worker {address!r} is not host:port")
    return host.strip("[]"), int(port)


def _bind(address: str) -> str:
    _, port = _split(address)
    with socket.socket() as own:
        # A connection that has just ended does not keep a server from starting.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except OSError as error:
            return reason(error)
    return ""


def _call(address: str, seconds: float) -> str:
    try:
        socket.create_connection(_split(address), timeout=seconds).close()
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, UnicodeError) as error:
        return reason(error)
    return ""
