"""Limits who can connect to a worker's port, and how long a connection may be silent.

TensorFlow's server listens on all addresses of a machine, even if its worker was given
only one address. A connection waits 15 minutes for a machine that is gone (TensorFlow
2.21). Linux can change both on open sockets.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from cifar10.distributed.cluster import Cluster
from cifar10.errors import UsageError, reason

# Time until an interrupted connection, or a worker without heartbeats, counts as lost.
SECONDS_OF_SILENCE = 25
_SECONDS_BETWEEN_QUESTIONS = 5
_LOOPBACK = r"::1|(::ffff:)?127(\.\d+){3}"


def open_port(cluster: Cluster) -> socket.socket:
    """Opens a server socket on this worker's port.

    The socket listens on all interfaces, or only on loopback if all workers run on this
    machine.
    """
    worker = cluster.this_worker
    host, port = worker.host_and_port
    dual = socket.has_dualstack_ipv6() and not cluster.is_on_loopback
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    address = (host if cluster.is_on_loopback else "", port)
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UsageError(
            f"{worker} cannot use port {port} of this machine: {reason(error)}.\n"
            "If another worker uses the port, give each worker its own index in "
            "TF_CONFIG. Otherwise end the process that uses it, or choose another port."
        ) from error


def confine(port: int) -> bool:
    """Blocks other machines from a port on which this process listens.

    Binds the listening socket to loopback (Linux 5.7 or later), and closes connections
    from other machines. Returns whether binding succeeded.
    """
    confined = False
    for one in _open_sockets():
        with contextlib.suppress(OSError):  # The socket is not connected.
            if one.getsockname()[1:2] != (port,):
                continue
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
                confined = True
            elif not re.fullmatch(_LOOPBACK, one.getpeername()[0]):
                one.shutdown(socket.SHUT_RDWR)
    return confined


def limit_silence_of(cluster: Cluster) -> None:
    """Limits how long connections to the other workers may be silent."""
    _, *own = cluster.this_worker.host_and_port
    theirs = [[worker.host_and_port[1]] for worker in cluster.other_workers]
    for one in _open_sockets():
        with contextlib.suppress(OSError):  # The socket is not connected.
            if [*one.getpeername()[1:2]] in theirs or [*one.getsockname()[1:2]] == own:
                limit_silence(one)


def limit_silence(connection: socket.socket) -> None:
    """Makes Linux end a connection after `SECONDS_OF_SILENCE` without an answer."""
    questions = SECONDS_OF_SILENCE // _SECONDS_BETWEEN_QUESTIONS
    for option, value in (
        (socket.TCP_KEEPIDLE, _SECONDS_BETWEEN_QUESTIONS),
        (socket.TCP_KEEPINTVL, _SECONDS_BETWEEN_QUESTIONS),
        (socket.TCP_KEEPCNT, questions - 1),
        # For sent data that has not been acknowledged.
        (socket.TCP_USER_TIMEOUT, 1000 * SECONDS_OF_SILENCE),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _open_sockets() -> Iterator[socket.socket]:
    """Yields all sockets of this process, including TensorFlow's; only on Linux."""
    for opened in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # The descriptor may be closed by now.
            if opened.is_socket():
                with socket.socket(fileno=os.dup(int(opened.name))) as one:
                    yield one
