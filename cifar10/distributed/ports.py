"""The ports of workers: who can connect, and how long a worker may be silent.

TensorFlow's server listens at all of a machine's addresses, whichever its worker was
given, and its connections wait a quarter of an hour for a machine that is gone
(TensorFlow 2.21). Linux can change both on open sockets.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from cifar10.distributed.cluster import Cluster
from cifar10.errors import UsageError, reason

# An interrupted connection lasts so long: like a worker without heartbeats.
SECONDS_OF_SILENCE = 25
_SECONDS_BETWEEN_QUESTIONS = 5
_LOOPBACK = r"::1|(::ffff:)?127(\.\d+){3}"


def open_port(cluster: Cluster) -> socket.socket:
    """Opens a server socket on this worker's port.

    It listens on all interfaces, or only on loopback if all workers run on this
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
            "If another worker uses it, each needs an index of its own in TF_CONFIG; "
            "else end the process that uses it, or give another port."
        ) from error


def confine(port: int) -> bool:
    """Lets no other machine reach a port at which this process listens.

    Linux, from 5.7 on, binds an open socket to a device as well; connections that came
    from elsewhere until then are cut. Returns whether that succeeded.
    """
    confined = False
    for one in _open_sockets():
        with contextlib.suppress(OSError):  # It is not connected.
            if one.getsockname()[1:2] != (port,):
                continue
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
                confined = True
            elif not re.fullmatch(_LOOPBACK, one.getpeername()[0]):
                one.shutdown(socket.SHUT_RDWR)
    return confined


def limit_silence_of(cluster: Cluster) -> None:
    """Limits the silence of this process's connections to the other workers."""
    _, *own = cluster.this_worker.host_and_port
    theirs = [[worker.host_and_port[1]] for worker in cluster.other_workers]
    for one in _open_sockets():
        with contextlib.suppress(OSError):  # It is not connected.
            if [*one.getpeername()[1:2]] in theirs or [*one.getsockname()[1:2]] == own:
                limit_silence(one)


def limit_silence(connection: socket.socket) -> None:
    """Has Linux end a connection if the other machine is silent for some time."""
    questions = SECONDS_OF_SILENCE // _SECONDS_BETWEEN_QUESTIONS
    for option, value in (
        (socket.TCP_KEEPIDLE, _SECONDS_BETWEEN_QUESTIONS),
        (socket.TCP_KEEPINTVL, _SECONDS_BETWEEN_QUESTIONS),
        (socket.TCP_KEEPCNT, questions - 1),
        # Of what has been sent and not been acknowledged.
        (socket.TCP_USER_TIMEOUT, 1000 * SECONDS_OF_SILENCE),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _open_sockets() -> Iterator[socket.socket]:
    """Yields this process's sockets, TensorFlow's too; none where this is not Linux."""
    for opened in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # A descriptor may be closed meanwhile.
            if opened.is_socket():
                with socket.socket(fileno=os.dup(int(opened.name))) as one:
                    yield one
