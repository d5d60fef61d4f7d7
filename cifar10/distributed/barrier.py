"""Waits until all workers of a training have arrived, before TensorFlow does.

TensorFlow waits in a call that holds Python's lock: no signal, thread or timeout of
Python's gets through, and it does not report which worker is missing. So the workers
first meet at the chief's address over plain sockets, and close them again.

    chief     cifar10 chief:CHALLENGE
    worker    PROOF CHALLENGE INDEX ADDRESSES
    chief     PROOF REASON                 (empty, or why the training does not start)

A proof is an HMAC of the sender's role, the other side's challenge and the text behind
the proof. Its key is a secret that all workers of a training share. Without one the key
is empty, and whoever reaches the port can take part.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cifar10.distributed.cluster import SECRET, Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError, reason, say

# Prefix of the chief's challenge.
_GREETING = "cifar10 chief:"
_DISAGREEMENT = "the workers were given different clusters"
_LONGEST_LINE = 2**16
# A peer that takes longer to send what it has ready is not a worker.
_SECONDS_TO_ANSWER = 5.0
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
    if cluster.is_chief and not cluster.secret:
        say(
            f"{cluster.this_worker}: without {SECRET} whoever reaches it can pose as a "
            "worker."
        )
    # Every worker binds its port, to find out that it is free.
    with _bind(cluster) as server:
        if cluster.is_chief:
            refusal = _run(_admit_workers(cluster, server, timeout))
    if not cluster.is_chief:
        refusal = _run(_report_to_chief(cluster, timeout))
    if refusal.startswith(_DISAGREEMENT):
        raise UsageError(f"{refusal}.\nGive all the same cluster in TF_CONFIG.")
    if refusal:
        raise LostWorkerError(
            f"{cluster.this_worker} has stopped waiting: {refusal}.\nStart the missing "
            f"workers, check the addresses in TF_CONFIG, the firewall and {SECRET}, "
            "or wait longer with --worker_timeout."
        )


def _run(meeting: Coroutine[Any, Any, str]) -> str:
    """Runs a coroutine, also where a loop already runs, as in Jupyter."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(meeting)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, meeting).result()


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


def _bind(cluster: Cluster) -> socket.socket:
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
            say(f"{self._worker} is waiting for {_names(missing)}.")
        if waited > self._timeout:
            return f"{_names(missing)} did not arrive within {self._timeout:g} s"
        return ""


async def _admit_workers(
    cluster: Cluster, server: socket.socket, timeout: float
) -> str:
    """Waits, as the chief, for every worker's report, and answers all of them.

    Returns why the training does not start; empty if it does.
    """
    refusal = ""
    workers = {str(n): worker for n, worker in enumerate(cluster.workers) if n}
    arrived: dict[str, asyncio.Task | None] = {}
    decided = asyncio.Event()

    async def receive(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal refusal
        # A port scanner may connect, and a worker may be killed. Connections still
        # silent at the end are cancelled, which Python 3.11 would show as an exception.
        nothing = (OSError, ValueError, asyncio.CancelledError)
        with contextlib.suppress(*nothing), contextlib.closing(writer):
            challenge = secrets.token_hex(16)
            writer.write(f"{_GREETING}{challenge}\n".encode())
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                report = await _read_signed(reader, cluster, f"worker {challenge}")
            their_challenge, index, addresses = report.split(" ", 2)
            if index not in workers:
                return
            if addresses != (ours := _addresses(cluster)):
                refusal = f"{_DISAGREEMENT}: {ours} and {addresses!a}"
            arrived[index] = asyncio.current_task()
            await decided.wait()
            writer.write(_signed(cluster, f"chief {their_challenge}", refusal))
            # The side that closes first keeps the port for a while.
            await reader.read()

    deadline = _Deadline(cluster, timeout)
    # Every connection is a task, so that silent ones keep no worker waiting.
    listening = await asyncio.start_server(receive, sock=server, limit=_LONGEST_LINE)
    while not refusal and (missing := workers.keys() - arrived):
        refusal = deadline.refusal([workers[index] for index in sorted(missing)])
        await asyncio.sleep(0.1)
    listening.close()
    decided.set()
    if tasks := [*filter(None, arrived.values())]:
        await asyncio.wait(tasks, timeout=_SECONDS_TO_ANSWER)
    return refusal


async def _report_to_chief(cluster: Cluster, timeout: float) -> str:
    """Connects to the chief until it answers; returns as `_admit_workers` does."""
    deadline = _Deadline(cluster, timeout)
    while True:
        with contextlib.suppress(OSError, ValueError):
            # The chief may not have begun to wait yet.
            async with asyncio.timeout(timeout + 10):
                return await _report(cluster)
        if refusal := deadline.refusal(cluster.workers[:1]):
            return refusal
        await asyncio.sleep(0.3)


async def _report(cluster: Cluster) -> str:
    """Reports to the chief once; a `ValueError` if something else answers."""
    host, port = cluster.workers[0].host_and_port
    async with asyncio.timeout(_SECONDS_TO_ANSWER):
        reader, writer = await asyncio.open_connection(host, port, limit=_LONGEST_LINE)
    with contextlib.closing(writer):
        async with asyncio.timeout(_SECONDS_TO_ANSWER):
            greeting = (await reader.readline()).decode().strip()
        if not greeting.startswith(_GREETING):
            raise ValueError(greeting)
        context = f"worker {greeting.removeprefix(_GREETING)}"
        challenge = secrets.token_hex(16)
        report = f"{challenge} {cluster.index} {_addresses(cluster)}"
        writer.write(_signed(cluster, context, report))
        return await _read_signed(reader, cluster, f"chief {challenge}")


def _signed(cluster: Cluster, context: str, text: str) -> bytes:
    """Returns a line that proves that its sender knows the secret.

    `context` is the sender's role, so that no line serves as the other side's, and the
    challenge, so that none serves twice.
    """
    proof = hmac.digest(cluster.secret, f"{context} {text}".encode(), "sha256")
    return f"{proof.hex()} {text}\n".encode()


async def _read_signed(
    reader: asyncio.StreamReader, cluster: Cluster, context: str
) -> str:
    """Returns the text of a line; a `ValueError` if it has no proof, or is too long."""
    line = await reader.readline()
    text = line.decode().removesuffix("\n").partition(" ")[2]
    if not hmac.compare_digest(line, _signed(cluster, context, text)):
        raise ValueError(text)
    return text


def _addresses(cluster: Cluster) -> str:
    return ",".join(worker.address for worker in cluster.workers)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers))
