"""Waits until all workers have started, before TensorFlow connects them.

Each worker connects to the chief and sends its index. Once the last one has come, the
chief answers all. TensorFlow cannot replace this: it waits for workers in a call that
blocks Python's signals, does not end and does not name who is missing (2.21).

Workers do not authenticate, because that would protect nothing: on the same port
TensorFlow then accepts commands from anybody who can connect.
"""

import contextlib
import math
import socket
import struct
import time
from multiprocessing.connection import Connection

from cifar10.distributed.cluster import Cluster
from cifar10.errors import LostWorkerError, UsageError, reason, say

# A peer that needs longer to send its index is not a worker.
_SECONDS_TO_SEND = 2.0
_SECONDS_BETWEEN_CALLS = 0.3
_SECONDS_BETWEEN_NOTICES = 10.0
_ANSWER = b"all workers are there"
# Errors of a connection whose peer is not a worker but, for example, a port scanner.
_NO_WORKER = (OSError, EOFError, ValueError)


def meet(cluster: Cluster, timeout: float) -> None:
    """Waits until all workers have started, for at most `timeout` seconds."""
    _, port = cluster.host_and_port(cluster.index)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"{cluster.name()} cannot use port {port}: {reason(error)}. Give each "
            "worker its own index in TF_CONFIG, or choose another port."
        ) from error
    with server:  # The other workers only reserve their ports for TensorFlow.
        if cluster.index == 0:
            missing = _await_others(cluster, timeout, server)
        else:
            missing = _await_chief(cluster, timeout)
    if missing:
        raise LostWorkerError(
            f"{cluster.name()} timed out after {timeout:g} s waiting for "
            f"{cluster.name(*missing)}. Its output may say why. Start it, check the "
            "firewall and TF_CONFIG (addresses, and a different index for each), or "
            "raise --worker_timeout."
        )


def _await_others(cluster: Cluster, timeout: float, server: socket.socket) -> list[int]:
    """Answers the other workers once all are there; returns those that are missing."""
    deadline = time.monotonic() + timeout
    arrived: dict[int, Connection] = {}
    # A worker that waits sends nothing. One with something to read has ended.
    while missing := [
        n for n in cluster.others if n not in arrived or arrived[n].poll(0)
    ]:
        if (left := deadline - time.monotonic()) <= 0:
            return missing
        server.settimeout(min(left, _SECONDS_BETWEEN_NOTICES))
        try:
            worker = _connection(server.accept()[0], _SECONDS_TO_SEND)
            if (index := int(worker.recv_bytes(len(_ANSWER)))) in missing:
                arrived[index] = worker
        except TimeoutError:
            say(f"{cluster.name(0)} is waiting for {cluster.name(*missing)}.")
        except _NO_WORKER:
            continue
    for worker in arrived.values():
        with contextlib.suppress(OSError):  # It has ended just now.
            worker.send_bytes(_ANSWER)
    return []


def _await_chief(cluster: Cluster, timeout: float) -> list[int]:
    """Waits for the chief to answer; returns [0] if it does not."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(*_NO_WORKER):  # The chief does not listen yet.
            called = socket.create_connection(cluster.host_and_port(0), left)
            chief = _connection(called, left)
            chief.send_bytes(str(cluster.index).encode())
            if chief.recv_bytes(len(_ANSWER)) == _ANSWER:
                return []
        time.sleep(_SECONDS_BETWEEN_CALLS)
    return [0]


def _connection(peer: socket.socket, seconds: float) -> Connection:
    """Returns a connection that waits only some seconds for each part of a message."""
    peer.settimeout(None)
    limit = struct.pack("ll", math.ceil(seconds), 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(peer.detach())
