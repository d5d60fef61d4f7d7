"""Connects the workers of a training run through a small server on the chief.

Every worker, including the chief, connects to the server before TensorFlow starts, and
stays connected until the worker ends. Through the server the workers wait for one
another, compare their settings, and report what each waits for while a step hangs.
TensorFlow cannot replace this server: while TensorFlow waits for workers, it blocks
Python's signals, threads and timeouts, and does not report which worker is missing.

Once all workers have connected, the server accepts no more connections, because
TensorFlow's server needs the port. A worker sends a value as JSON, and gets all values:

    [KEY, VALUE, SECONDS] -> [REFUSAL, [[INDEX, VALUE], ...]]

Workers do not authenticate, because that would protect nothing: on the same port
TensorFlow accepts commands from anybody who can connect.
"""

import asyncio
import collections
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from cifar10.distributed import ports
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import (
    EXIT_USAGE,
    LostWorkerError,
    UnavailableError,
    UsageError,
    reason,
    say,
)

# The key of a worker's first line, which holds its index and the addresses it knows.
_ARRIVAL = "arrival"
_LONGEST_LINE = 2**21
# A peer that needs longer for a line is not a worker.
_SECONDS_TO_ANSWER = 5.0
_SECONDS_UNTIL_NOTICE = 5.0
_SECONDS_BETWEEN_CALLS = 0.3
_SECONDS_UNTIL_OTHERS_KNOW = 0.1
# Errors of a connection whose peer is not a worker but, for example, a port scanner.
_NO_WORKER = (OSError, ValueError, TypeError, OverflowError, RecursionError)


class Rendezvous:
    """This worker's connection to the other workers, through the chief.

    Attributes:
        cluster: The workers. Their addresses are complete once all have connected.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        """Connects the workers. Waits at most `timeout` seconds, as does `gather`."""
        self.cluster = cluster
        self._timeout = timeout
        self._asking = threading.Lock()
        # Nobody connects to the other workers, who only reserve ports for TensorFlow.
        listener = ports.open_port(cluster)
        server = _Server(cluster, listener) if cluster.index == 0 else listener
        try:
            self._arrive()
        finally:
            server.close()

    def gather(self, key: str, value: Any) -> list[Any]:
        """Sends a value, and returns the values of all workers, in worker order.

        Raises:
            LostWorkerError: A worker has ended, or did not send its value in time.
            UsageError: A worker has refused to train.
        """
        values = self.exchange(key, value, self._timeout)
        self._check_complete(values)
        return [values[worker.index] for worker in self.cluster.workers]

    def refuse(self, error: UsageError) -> None:
        """Sends this worker's error to all workers, whose `gather` then raises it."""
        with contextlib.suppress(LostWorkerError, UsageError):
            text = f"{self.cluster.this_worker} refused to train: {error}"
            self.exchange("refusal", [text, error.exit_code], 0)

    def exchange(self, key: str, value: Any, seconds: float) -> dict[int, Any]:
        """Sends a value for `key`, and returns the workers' values so far, by index.

        Waits until all connected workers have sent a value, or until one of them has
        waited for the `seconds` that it gave. The wait then ends for all workers.
        """
        try:
            with self._asking:
                self._connection.settimeout(seconds + _SECONDS_TO_ANSWER)
                self._lines.write(_line([key, value, seconds]))
                self._lines.flush()
                longest = _LONGEST_LINE * len(self.cluster.workers)
                refusal, values = json.loads(self._lines.readline(longest))
        except _NO_WORKER as error:
            raise LostWorkerError(
                f"{self.cluster.workers[0]} has ended or does not answer. The output "
                "of that worker may say why."
            ) from error
        if refusal:
            text, code = refusal
            raise (UsageError if code == EXIT_USAGE else UnavailableError)(text)
        return dict(values)

    def _arrive(self) -> None:
        """Connects to the chief, and waits until all other workers have connected."""
        workers, index = self.cluster.workers, self.cluster.index
        value = [index, [worker.address for worker in workers]]
        began = time.monotonic()
        arrived: dict[int, Any] = dict.fromkeys(range(1, len(workers)))
        is_told, why, unknown = False, "", False
        while (waited := time.monotonic() - began) < self._timeout:
            try:
                address = workers[0].host_and_port
                self._connection = socket.create_connection(address, _SECONDS_TO_ANSWER)
                with self._connection:  # The file keeps it open.
                    self._lines = self._connection.makefile("rwb")
                arrived = self.exchange(_ARRIVAL, value, self._timeout - waited)
                break
            except OSError as error:  # The chief does not listen yet.
                why, unknown = f" ({reason(error)})", error.errno == socket.EAI_NONAME
            except LostWorkerError:
                why, unknown = " (another program answers at that address)", False
            if waited > _SECONDS_UNTIL_NOTICE and not is_told:
                is_told = True
                say(f"{workers[index]} is waiting for {workers[0]}{why}.")
            time.sleep(_SECONDS_BETWEEN_CALLS)
        else:
            # Kubernetes names a pod only once it runs, perhaps at the next attempt.
            if unknown and "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise UsageError(
                    f"{workers[0]}: this machine still cannot find the host{why} after "
                    f"{self._timeout:g} s. Correct the name in TF_CONFIG or in the DNS."
                )
        self._check_complete(arrived, why)
        addresses = [known for worker in workers for known in arrived[worker.index]]
        self.cluster = Cluster.at(addresses, index)

    def _check_complete(self, values: dict[int, Any], why: str = "") -> None:
        if absent := [one for one in self.cluster.workers if one.index not in values]:
            raise LostWorkerError(
                f"{self.cluster.this_worker} has stopped waiting: {_names(absent)} has "
                f"ended, or did not arrive within {self._timeout:g} s{why}.\nThe "
                "output of that worker may say why. If there is no output, start that "
                "worker, and check the\nfirewall and TF_CONFIG (addresses, index). If "
                "it only starts slowly, raise --worker_timeout."
            )


class _Server:
    """Collects a value from each worker, and sends all values to all workers."""

    def __init__(self, cluster: Cluster, listener: socket.socket) -> None:
        self._cluster = cluster
        self._connected: set[int] = set()
        self._refusal: list[Any] = []  # The message of a refusal, and its exit code.
        self._values: dict[str, dict[int, Any]] = collections.defaultdict(dict)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_ignore_lack_of_files)
        # By key. A future is done once the server stops waiting for values of its key.
        self._decisions: dict[str, asyncio.Future[None]] = collections.defaultdict(
            self._loop.create_future
        )
        self._notice = self._loop.call_later(
            _SECONDS_UNTIL_NOTICE, self._say_who_is_missing
        )
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        serving = asyncio.start_server(self._serve, sock=listener, limit=_LONGEST_LINE)
        self._server = self._run(serving)

    def close(self) -> None:
        """Frees the port; the workers stay connected."""

        async def close() -> None:
            self._server.close()
            self._notice.cancel()

        self._run(close())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _say_who_is_missing(self) -> None:
        workers, arrived = self._cluster.workers, self._values[_ARRIVAL]
        if missing := [worker for worker in workers if worker.index not in arrived]:
            say(f"{workers[0]} is waiting for {_names(missing)}.")

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves a connection until it ends; ignores a peer that is not a worker."""
        index = None
        with contextlib.closing(writer), contextlib.suppress(*_NO_WORKER):
            line = await asyncio.wait_for(reader.readline(), _SECONDS_TO_ANSWER)
            index = self._admit(json.loads(line), writer)
            while line:
                key, value, seconds = json.loads(line)
                if key == "refusal":
                    self._refusal = self._refusal or value
                elif key == _ARRIVAL:  # Keeps only the worker's own address.
                    value = value[1][index : index + 1]
                self._values[key][index] = value
                self._decide_complete()
                following = asyncio.ensure_future(reader.readline())
                either = (following, self._decisions[key])
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(either, timeout=seconds, return_when=first)
                if not following.done():  # Otherwise the worker has disconnected.
                    self._decide(key)
                    answer = _line([self._refusal, [*self._values[key].items()]])
                    if index == 0:  # The chief may end as soon as it has the answer.
                        await asyncio.sleep(_SECONDS_UNTIL_OTHERS_KNOW)
                    writer.write(answer)
                line = await following
        if index in self._connected:
            self._connected.discard(index)
            if not self._decisions[_ARRIVAL].done():  # The worker is missing again.
                self._values[_ARRIVAL].pop(index, None)
            self._decide_complete()

    def _admit(self, greeting: Any, writer: asyncio.StreamWriter) -> int:
        """Registers a worker that has connected, and returns its index.

        If the worker conflicts with another worker, all workers get a refusal.
        """
        key, (index, addresses), _ = greeting
        own = [worker.address for worker in self._cluster.workers]
        if key != _ARRIVAL or index not in range(len(own)):
            raise ValueError(greeting)
        connection = writer.get_extra_info("socket")
        both = zip(own, addresses, strict=False)
        problem = ""
        if len(own) != len(addresses) or any(a != b and a and b for a, b in both):
            problem = f"the workers have different clusters: {own} and {addresses!a}"
        elif index in self._connected:
            host = connection.getpeername()[0].replace("::ffff:", "")
            place = f"{self._cluster.workers[index]}, and one on {host}"
            problem = f"two processes have the same index: {place}"
        if problem and not self._refusal:
            fix = "In TF_CONFIG, give all workers one cluster and each its own index."
            self._refusal = [f"{problem}.\n{fix}", EXIT_USAGE]
        with contextlib.suppress(AttributeError, OSError):  # Not supported everywhere.
            ports.limit_silence(connection)
        self._connected.add(index)
        return index

    def _decide_complete(self) -> None:
        """Ends the waits for keys with all their values; after a refusal, all waits."""
        for key in self._decisions:
            expected = self._connected
            if key == _ARRIVAL:
                expected = {worker.index for worker in self._cluster.workers}
            if self._refusal or self._values[key].keys() >= expected:
                self._decide(key)

    def _decide(self, key: str) -> None:
        if not self._decisions[key].done():
            self._decisions[key].set_result(None)


def _ignore_lack_of_files(loop: Any, context: dict[str, Any]) -> None:
    """Ignores any `OSError` in the event loop, such as a lack of file descriptors."""
    if not isinstance(context.get("exception"), OSError):  # Port scans cause some.
        loop.default_exception_handler(context)


def _line(value: Any) -> bytes:
    return f"{json.dumps(value, default=str)}\n".encode()


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers))
