"""Waits until all workers of a training have arrived, before TensorFlow does.

TensorFlow waits in a call that holds Python's lock: no signal, thread or timeout of
Python's gets through, and it does not report which worker is missing. So the workers
first meet at the chief's address over plain sockets, and close them again. Each also
calls at its own address: if another process answers there, both have the same index,
and the one that was called tells the chief, whom the others wait for.

    listener  cifar10 worker:CHALLENGE
    caller    PROOF CHALLENGE INDEX_OF_LISTENER INDEX ADDRESSES REASON
    listener  PROOF REASON

A reason, why the training does not start, is empty where there is none.

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

# Prefix of the listener's challenge.
_GREETING = "cifar10 worker:"
_DISAGREEMENT = "the workers were given different clusters"
_TWICE = "two processes have the same index"
_LONGEST_LINE = 2**16
# A peer that takes longer to send what it has ready is not a worker.
_SECONDS_TO_ANSWER = 5.0
_SECONDS_UNTIL_NOTICE = 5.0
# A chief that was started together with this worker listens by then.
_SECONDS_TO_TELL_THE_CHIEF = 30.0
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
    with bind_port(cluster) as server:
        refusal = _run(_Meeting(cluster, timeout).hold(server))
    if refusal.startswith((_DISAGREEMENT, _TWICE)):
        raise UsageError(
            f"{refusal}.\nIn TF_CONFIG, give all workers the same cluster and each its "
            "own index."
        )
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

    Use it once.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._start = time.monotonic()
        self._noticed = False
        # Of the workers that wait here for the decision, by their connections.
        self._arrived: dict[asyncio.Task | None, str] = {}
        self._own_challenges: set[str] = set()
        self._decided = asyncio.Event()
        self._refusal = ""
        self._tells_the_chief = False

    async def hold(self, server: socket.socket) -> str:
        """Waits; returns why the training does not start, empty if it does."""
        # Strangers may open more connections than this process may have files.
        asyncio.get_running_loop().set_exception_handler(_ignore_full)
        # Every connection is a task, so that silent ones keep no worker waiting.
        listening = await asyncio.start_server(
            self._receive, sock=server, limit=_LONGEST_LINE
        )
        is_chief = self._cluster.is_chief
        tasks = [
            asyncio.create_task(self._admit_all() if is_chief else self._call(0)),
            asyncio.create_task(self._call(self._cluster.index)),
        ]
        decided = asyncio.create_task(self._decided.wait())
        done, _ = await asyncio.wait(
            [decided, *tasks], return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()  # Raises what nobody foresaw.
        listening.close()
        if self._arrived:
            await asyncio.wait(
                [*filter(None, self._arrived)], timeout=_SECONDS_TO_ANSWER
            )
        for task in tasks:
            task.cancel()
        if self._tells_the_chief:
            await self._tell_the_chief()
        return self._refusal

    async def _tell_the_chief(self) -> None:
        """Reports the refusal to the chief, which may not have begun to wait yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_TO_TELL_THE_CHIEF):
                while True:
                    with contextlib.suppress(OSError, ValueError):
                        await self._report(0, self._refusal)
                        return
                    await asyncio.sleep(0.3)

    def _decide(self, refusal: str) -> None:
        if not self._decided.is_set():
            self._refusal = refusal
            self._decided.set()

    async def _admit_all(self) -> None:
        """Waits, as the chief, until every other worker has arrived."""
        workers = {str(n): worker for n, worker in enumerate(self._cluster.workers)}
        del workers["0"]
        while missing := workers.keys() - self._arrived.values():
            self._end_in_time([workers[index] for index in sorted(missing)])
            await asyncio.sleep(0.1)
        self._decide("")

    def _end_in_time(self, missing: Sequence[Worker]) -> None:
        """Prints once who is missing, and ends the meeting when it is time."""
        waited = time.monotonic() - self._start
        if waited > _SECONDS_UNTIL_NOTICE and not self._noticed:
            self._noticed = True
            say(f"{self._cluster.this_worker} is waiting for {_names(missing)}.")
        if waited > self._timeout:
            self._decide(f"{_names(missing)} did not arrive within {self._timeout:g} s")

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers a caller once it is decided, if it is a worker with a place here."""
        # A port scanner may connect, and a worker may be killed. Connections still
        # silent at the end are cancelled, which Python 3.11 would show as an exception.
        nothing = (OSError, ValueError, asyncio.CancelledError)
        with contextlib.suppress(*nothing), contextlib.closing(writer):
            challenge = secrets.token_hex(16)
            writer.write(f"{_GREETING}{challenge}\n".encode())
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                report = await _read_signed(
                    reader, self._cluster, f"worker {challenge}"
                )
            their_challenge, listener, index, rest = report.split(" ", 3)
            addresses, _, refusal = rest.partition(" ")
            if not self._has_a_place_here(listener, index):
                return
            if addresses != (ours := _addresses(self._cluster)):
                refusal = f"{_DISAGREEMENT}: {ours} and {addresses!a}"
            elif index == listener and their_challenge not in self._own_challenges:
                host = writer.get_extra_info("peername")[0].removeprefix("::ffff:")
                refusal = f"{_TWICE}: {self._cluster.this_worker}, and one on {host}"
                self._tells_the_chief = not self._cluster.is_chief
            if refusal:
                self._decide(refusal)
            task = asyncio.current_task()
            self._arrived[task] = index
            gone = asyncio.create_task(reader.read(1))
            decided = asyncio.create_task(self._decided.wait())
            await asyncio.wait([gone, decided], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():  # It was killed, and is missing again.
                del self._arrived[task]
                return
            refusal = refusal or self._refusal
            writer.write(_signed(self._cluster, f"chief {their_challenge}", refusal))
            # The side that closes first keeps the port for a while.
            await gone

    def _has_a_place_here(self, listener: str, index: str) -> bool:
        """Returns whether a caller is right here: at the chief, or at its own place."""
        others = map(str, range(1, len(self._cluster.workers)))
        is_expected = index == listener or (self._cluster.is_chief and index in others)
        return listener == str(self._cluster.index) and is_expected

    async def _call(self, index: int) -> None:
        """Calls a worker, the chief or the own place, until it answers."""
        worker = self._cluster.workers[index]
        while True:
            with contextlib.suppress(OSError, ValueError):
                # It may not have begun to wait yet.
                async with asyncio.timeout(self._timeout + 10):
                    self._decide(await self._report(index))
                    return
            if index != self._cluster.index:
                self._end_in_time([worker])
            await asyncio.sleep(0.3)

    async def _report(self, index: int, refusal: str = "") -> str:
        """Reports to a worker once; a `ValueError` if something else answers."""
        cluster = self._cluster
        host, port = cluster.workers[index].host_and_port
        async with asyncio.timeout(_SECONDS_TO_ANSWER):
            reader, writer = await asyncio.open_connection(
                host, port, limit=_LONGEST_LINE
            )
        with contextlib.closing(writer):
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                greeting = (await reader.readline()).decode().strip()
            if not greeting.startswith(_GREETING):
                raise ValueError(greeting)
            context = f"worker {greeting.removeprefix(_GREETING)}"
            challenge = secrets.token_hex(16)
            if index == cluster.index:
                self._own_challenges.add(challenge)
            report = f"{challenge} {index} {cluster.index} {_addresses(cluster)}"
            writer.write(_signed(cluster, context, f"{report} {refusal}"))
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


def _ignore_full(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports what goes wrong in the loop, but no connection that is not accepted."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


def _addresses(cluster: Cluster) -> str:
    return ",".join(worker.address for worker in cluster.workers)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers))
