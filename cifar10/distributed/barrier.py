"""Waits until all workers of a training have arrived, before TensorFlow does.

TensorFlow waits in a call that holds Python's lock: no signal, thread or timeout of
Python's gets through, and it does not report which worker is missing. So the workers
first meet at the chief's address over plain sockets, and close them again. Each also
calls at its own address: if another process answers there, both have the same index,
and the one that was called tells the chief, whom the others wait for.

A caller sends a line of JSON, and gets one when it is decided whether they train:

    [INDEX_OF_LISTENER, INDEX, PROCESS, [ADDRESS, ...], REASON]
    {"reason": REASON}

A reason, why the training does not start, is empty where there is none. Nobody proves
who it is, since that would protect nothing: at the same port TensorFlow takes commands
from everybody who reaches it.
"""

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError, reason, say

_DISAGREEMENT = "the workers were given different clusters"
_TWICE = "two processes have the same index"
_LONGEST_LINE = 2**16
# A peer that takes longer to send what it has ready is not a worker.
_SECONDS_TO_ANSWER = 5.0
_SECONDS_UNTIL_NOTICE = 5.0
# A chief that was started together with this worker listens by then.
_SECONDS_TO_TELL_THE_CHIEF = 30.0
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_CALLS = 0.3
# Once all have arrived, connecting them takes a second or two.
SECONDS_TO_CONNECT = 60
# Raised where no worker answers, or no worker calls: port scanners do, too.
_NO_WORKER = (OSError, ValueError, TypeError, KeyError, RecursionError)

# Kills its parent unless its input is closed in time.
_GUARD = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[2].encode())
    os.kill(os.getppid(), 9)
"""


def wait_for_all(cluster: Cluster, timeout: float) -> None:
    """Waits at most `timeout` seconds for the other workers."""
    with bind_port(cluster) as server:
        refusal = _Meeting(cluster, timeout).hold(server)
    if refusal.startswith((_DISAGREEMENT, _TWICE)):
        raise UsageError(
            f"{refusal}.\nIn TF_CONFIG, give all workers the same cluster and each its "
            "own index."
        )
    if refusal:
        raise LostWorkerError(
            f"{cluster.this_worker} has stopped waiting: {refusal}.\nStart the missing "
            "workers, check the addresses in TF_CONFIG and the firewall, or wait "
            "longer with --worker_timeout."
        )


@contextlib.contextmanager
def guarded(cluster: Cluster) -> Iterator[None]:
    """Kills this process, with a message, if TensorFlow does not connect the workers.

    A firewall between two of them can be the cause. Only another process can notice it.
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


def bind_port(cluster: Cluster) -> socket.socket:
    """Returns a server socket at this worker's port.

    It is on all addresses of the machine, unless all workers are on this one.
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
            f"{worker}: port {port} of this machine cannot be used: {reason(error)}.\n"
            "End the process that uses it, or give another port in TF_CONFIG."
        ) from error


class _Meeting:
    """What this worker knows while it waits, at most `timeout` seconds, for the rest.

    Every connection has a thread of its own, so that silent ones keep no worker
    waiting. Use it once.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._start = time.monotonic()
        self._process = secrets.token_hex(8)  # Tells apart two with the same index.
        self._addresses = [worker.address for worker in cluster.workers]
        # Of the callers that wait here: their indices, and why each must not train.
        self._arrived: list[tuple[int, str]] = []
        self._waits_at: set[int] = set()  # Indices of the listeners that were reached.
        self._noticed = False
        self._tells_the_chief = False
        self._deciding = threading.Lock()
        self._decided = threading.Event()
        self._refusal = ""

    def hold(self, server: socket.socket) -> str:
        """Waits; returns why the training does not start, empty if it does."""
        for index in {0, self._cluster.index}:
            _in_thread(self._call, index)
        server.settimeout(_SECONDS_BETWEEN_LOOKS)
        try:
            while not self._decided.is_set():
                # Nobody calls, or so many strangers that files or threads have run out.
                with contextlib.suppress(OSError, RuntimeError):
                    connection, (host, *_) = server.accept()
                    _in_thread(self._receive, connection, host)
                self._look_who_is_missing()
        finally:
            self._decide("it was interrupted")  # By a signal; this ends the threads.
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while self._arrived and time.monotonic() < deadline:  # They get the answer.
            time.sleep(0.01)
        deadline = time.monotonic() + _SECONDS_TO_TELL_THE_CHIEF
        while self._tells_the_chief and time.monotonic() < deadline:
            with contextlib.suppress(*_NO_WORKER):  # It may not wait yet.
                self._report(0, _SECONDS_TO_ANSWER)
                break
            time.sleep(_SECONDS_BETWEEN_CALLS)
        return self._refusal

    def _look_who_is_missing(self) -> None:
        """Ends the meeting if all are there or it is time; says once who is missing."""
        workers, is_chief = self._cluster.workers, self._cluster.is_chief
        expected = range(1, len(workers)) if is_chief else (0,)
        arrived = {index for index, refusal in self._arrived if not refusal}
        there = arrived if is_chief else self._waits_at
        missing = _names([workers[n] for n in expected if n not in there])
        waited = time.monotonic() - self._start
        if is_chief and not missing:
            self._decide("")
        elif missing and waited > self._timeout:
            self._decide(f"{missing} did not arrive within {self._timeout:g} s")
        elif missing and waited > _SECONDS_UNTIL_NOTICE and not self._noticed:
            self._noticed = True
            say(f"{self._cluster.this_worker} is waiting for {missing}.")

    def _decide(self, refusal: str) -> None:
        with self._deciding:
            if not self._decided.is_set():
                self._refusal = refusal
                self._decided.set()

    def _receive(self, connection: socket.socket, host: str) -> None:
        """Answers a caller once it is decided, if it is a worker with a place here."""
        with connection, contextlib.suppress(*_NO_WORKER):
            connection.settimeout(_SECONDS_TO_ANSWER)
            listener, index, process, addresses, refusal = _read_line(connection)
            own, is_chief = self._cluster.index, self._cluster.is_chief
            places = range(len(self._addresses)) if is_chief else (own,)
            if listener != own or index not in places:
                return
            if addresses != self._addresses:
                refusal = f"{_DISAGREEMENT}: {self._addresses} and {addresses!a}"
            elif index == own and process != self._process:
                place = f"{self._cluster.this_worker}, and one on {host}"
                refusal = f"{_TWICE}: {place.replace('::ffff:', '')}"
                self._tells_the_chief = not is_chief
            arrival = (index, str(refusal))
            self._arrived.append(arrival)
            try:
                if refusal:
                    self._decide(str(refusal))
                connection.settimeout(_SECONDS_BETWEEN_LOOKS)
                while not self._decided.is_set():
                    with contextlib.suppress(TimeoutError):
                        connection.recv(1)
                        return  # It was killed, and is missing again.
                _send_line(connection, {"reason": refusal or self._refusal})
                # The side that closes first keeps the port for a while.
                connection.settimeout(_SECONDS_TO_ANSWER)
                connection.recv(1)
            finally:
                self._arrived.remove(arrival)

    def _call(self, index: int) -> None:
        """Calls a worker, the chief or the own place, until it answers."""
        while True:
            with contextlib.suppress(*_NO_WORKER):  # It may not have begun to wait.
                # The chief may have begun later, and waits as long.
                self._decide(self._report(index, self._timeout + 10))
                return
            self._waits_at.discard(index)
            if self._decided.wait(_SECONDS_BETWEEN_CALLS):
                return

    def _report(self, index: int, seconds: float) -> str:
        """Reports to a worker once, and returns its reason; `_NO_WORKER` without it."""
        call = [index, self._cluster.index, self._process, self._addresses]
        address = self._cluster.workers[index].host_and_port
        with socket.create_connection(address, _SECONDS_TO_ANSWER) as connection:
            _send_line(connection, [*call, self._refusal])
            self._waits_at.add(index)
            connection.settimeout(seconds)
            return str(_read_line(connection)["reason"])


def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _send_line(connection: socket.socket, value: Any) -> None:
    connection.sendall(f"{json.dumps(value)}\n".encode())


def _read_line(connection: socket.socket) -> Any:
    with connection.makefile("rb") as file:
        return json.loads(file.readline(_LONGEST_LINE))


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers))
