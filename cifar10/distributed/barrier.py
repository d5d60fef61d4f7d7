"""Waits until all workers of a training have arrived, before TensorFlow does.

TensorFlow waits in a call that holds Python's lock: no signal, thread or timeout of
Python's gets through, and it does not report which worker is missing. So the workers
first meet at the chief's address over plain sockets, and close them again.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError, reason

# Prefix of the chief's answer, before the reason of a refusal if there is one.
_ANSWER = "cifar10 chief:"
_DISAGREEMENT = "the workers were given different clusters"
_SECONDS_UNTIL_NOTICE = 5.0
# Once all have arrived, connecting them takes a second or two.
SECONDS_TO_CONNECT = 60

# Kills its parent unless its input is closed in time.
_GUARD = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[2].encode())
    os.kill(os.getppid(), 9)
"""


def wait_for_all(cluster: Cluster, timeout: float) -> None:
    """Waits at most `timeout` seconds for the other workers."""
    # Every worker binds its port, to find out that it is free.
    with _bind(cluster.this_worker) as server:
        if cluster.is_chief:
            refusal = _admit_workers(cluster, server, timeout)
    if not cluster.is_chief:
        refusal = _report_to_chief(cluster, timeout)
    if refusal.startswith(_DISAGREEMENT):
        raise UsageError(f"{refusal}.\nGive all the same cluster in TF_CONFIG.")
    if refusal:
        raise LostWorkerError(
            f"{cluster.this_worker} has stopped waiting: {refusal}.\nStart the missing "
            "workers, check the addresses in TF_CONFIG and the firewall, or wait "
            "longer with --worker_timeout."
        )


@contextlib.contextmanager
def guarded(cluster: Cluster) -> Iterator[None]:
    """Kills this process, with a message, if TensorFlow does not connect the workers.

    A firewall between two of them can be the cause. It takes another process to notice.
    """
    message = (
        f"{cluster.this_worker} was not connected to {_names(cluster.other_workers)} "
        f"within {SECONDS_TO_CONNECT} s although all had arrived.\nCheck that every "
        "worker can reach every other worker's address.\n"
    )
    command = [sys.executable, "-S", "-E", "-c", _GUARD, str(SECONDS_TO_CONNECT)]
    guard = subprocess.Popen([*command, message], stdin=subprocess.PIPE)  # noqa: S603
    try:
        yield
    finally:
        guard.communicate()


def _bind(worker: Worker) -> socket.socket:
    """Returns a server socket at a worker's port, on all addresses of the machine."""
    _, port = worker.host_and_port
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UsageError(
            f"{worker}: port {port} of this machine cannot be used: {reason(error)}.\n"
            "End the process that uses it, or give another port in TF_CONFIG."
        ) from error


class _Deadline:
    """How long the workers in `missing` may still take to arrive."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._worker = cluster.this_worker
        self._timeout = timeout
        self._start = time.monotonic()
        self._noticed = False

    def refusal(self, missing: Sequence[Worker]) -> str:
        """Returns why waiting ends, empty while it does not; prints a notice once."""
        waited = time.monotonic() - self._start
        if waited > _SECONDS_UNTIL_NOTICE and not self._noticed:
            self._noticed = True
            notice = f"{self._worker} is waiting for {_names(missing)}."
            print(notice, file=sys.stderr, flush=True)
        if waited > self._timeout:
            return f"{_names(missing)} did not arrive within {self._timeout:g} s"
        return ""


def _admit_workers(cluster: Cluster, server: socket.socket, timeout: float) -> str:
    """Waits, as the chief, for every worker's report, and answers all of them.

    Returns why the training does not start; empty if it does.
    """
    deadline = _Deadline(cluster, timeout)
    addresses = _addresses(cluster)
    refusal = ""
    server.settimeout(0.5)
    with contextlib.ExitStack() as stack:
        arrived: dict[int, socket.socket] = {}
        missing = dict(enumerate(cluster.workers[1:], 1))
        while missing and not refusal:
            refusal = deadline.refusal([*missing.values()])
            # A port scanner may connect, and a worker may be killed.
            with contextlib.suppress(OSError, ValueError, TypeError):
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(5)
                index, reported = json.loads(_read_line(connection))
                if not isinstance(index, int) or not isinstance(reported, list):
                    continue
                if reported != addresses:
                    refusal = f"{_DISAGREEMENT}: {addresses} and {reported}"
                arrived[index] = connection
                missing.pop(index, None)
        for connection in arrived.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{_ANSWER}{refusal}\n".encode())
                # The side that closes first keeps the port for a while.
                _read_line(connection)
    return refusal


def _report_to_chief(cluster: Cluster, timeout: float) -> str:
    """Connects to the chief until it answers; returns as `_admit_workers` does."""
    chief = cluster.workers[0]
    report = json.dumps([cluster.index, _addresses(cluster)])
    deadline = _Deadline(cluster, timeout)
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(chief.host_and_port, timeout=2) as connection,
        ):
            # The chief may have begun to wait later.
            connection.settimeout(timeout + 10)
            connection.sendall(f"{report}\n".encode())
            answer = _read_line(connection)
            if answer.startswith(_ANSWER):
                return answer.removeprefix(_ANSWER)
        if refusal := deadline.refusal([chief]):
            return refusal
        time.sleep(0.3)


def _addresses(cluster: Cluster) -> list[str]:
    return [worker.address for worker in cluster.workers]


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers))


def _read_line(connection: socket.socket) -> str:
    """Reads to the end of a line, or of the connection."""
    with connection.makefile("rb") as file:
        return file.readline(65_536).decode(errors="replace").strip()
