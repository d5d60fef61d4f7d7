"""Where the workers of a training meet: a small server at the chief's address.

All of them, the chief too, connect to it before TensorFlow starts, and keep the
connection until they end. Over it they wait for one another, compare their settings,
and tell what each waits for while a step hangs. TensorFlow itself waits in a call that
holds Python's lock: no signal, thread or timeout of Python's gets through, and it does
not report which worker is missing.

Once all have arrived the server takes no more connections, because TensorFlow's own
server needs the port. A worker sends lines of JSON, and each is answered:

    [KEY, VALUE, SECONDS] -> [REFUSAL, [[INDEX, VALUE], ...]]

No worker proves its identity, since that would protect nothing: at the same port
TensorFlow takes commands from everybody who reaches it.
"""

import asyncio
import collections
import contextlib
import json
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

# The key of a worker's first line, with its index and the addresses that it knows.
_ARRIVAL = "arrival"
_LONGEST_LINE = 2**21
# A peer that takes longer to send what it has ready is not a worker.
_SECONDS_TO_ANSWER = 5.0
_SECONDS_UNTIL_NOTICE = 5.0
_SECONDS_BETWEEN_CALLS = 0.3
_SECONDS_UNTIL_OTHERS_KNOW = 0.1
# Raised where no worker answers, or no worker calls: port scanners do, too.
_NO_WORKER = (OSError, ValueError, TypeError, OverflowError, RecursionError)


class Rendezvous:
    """This worker's connection to the others, through the chief.

    Attributes:
        cluster: The workers. Once they have met, the addresses of all are known.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        """Waits at most `timeout` seconds, here as in `gather`, for the others."""
        self.cluster = cluster
        self._timeout = timeout
        self._asking = threading.Lock()
        # Nobody calls the others, but their ports are kept for TensorFlow.
        listener = ports.open_port(cluster)
        server = _Server(cluster, listener) if cluster.index == 0 else listener
        try:
            self._arrive()
        finally:
            server.close()

    def gather(self, key: str, value: Any) -> list[Any]:
        """Sends a value, and returns the values of all workers, in their order.

        Raises:
            LostWorkerError: A worker has ended, or is late.
            UsageError: A worker has refused to train.
        """
        values = self.exchange(key, value, self._timeout)
        self._check_complete(values)
        return [values[worker.index] for worker in self.cluster.workers]

    def refuse(self, error: UsageError) -> None:
        """Sends this worker's error to all workers, whose `gather` then raises it."""
        with contextlib.suppress(LostWorkerError, UsageError):
            text = f"{self.cluster.this_worker} has refused: {error}"
            self.exchange("refusal", [text, error.exit_code], 0)

    def exchange(self, key: str, value: Any, seconds: float) -> dict[int, Any]:
        """Sends a value, and returns the values that have arrived, by worker index.

        Waits for the other workers until all have sent theirs, one is lost, or
        `seconds` have passed for any worker that waits.
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
                f"{self.cluster.workers[0]} has ended or does not answer; its own "
                "output may say why."
            ) from error
        if refusal:
            text, code = refusal
            raise (UsageError if code == EXIT_USAGE else UnavailableError)(text)
        return dict(values)

    def _arrive(self) -> None:
        """Connects to the chief, and waits there for the others."""
        workers, index = self.cluster.workers, self.cluster.index
        value = [index, [worker.address for worker in workers]]
        began = time.monotonic()
        arrived: dict[int, Any] = dict.fromkeys(range(1, len(workers)))
        is_told, why = False, ""
        while (waited := time.monotonic() - began) < self._timeout:
            try:
                address = workers[0].host_and_port
                self._connection = socket.create_connection(address, _SECONDS_TO_ANSWER)
                with self._connection:  # It ends with its file.
                    self._lines = self._connection.makefile("rwb")
                arrived = self.exchange(_ARRIVAL, value, self._timeout - waited)
                break
            except OSError as error:  # It is not there yet.
                why = f" ({reason(error)})"
            except LostWorkerError:
                why = " (something else answers there)"
            if waited > _SECONDS_UNTIL_NOTICE and not is_told:
                is_told = True
                say(f"{workers[index]} is waiting for {workers[0]}{why}.")
            time.sleep(_SECONDS_BETWEEN_CALLS)
        self._check_complete(arrived, why)
        addresses = [known for worker in workers for known in arrived[worker.index]]
        self.cluster = Cluster.at(addresses, index)

    def _check_complete(self, values: dict[int, Any], why: str = "") -> None:
        if absent := [one for one in self.cluster.workers if one.index not in values]:
            raise LostWorkerError(
                f"{self.cluster.this_worker} has stopped waiting: {_names(absent)} has "
                f"ended, or did not arrive within {self._timeout:g} s{why}.\n"
                "Its own output may say why. If there is none, start it, check the "
                "firewall, and the addresses and the index in TF_CONFIG.\nIf it is "
                "only slow, wait longer with --worker_timeout."
            )


class _Server:
    """Collects values from all workers and sends all of them to each, in a thread."""

    def __init__(self, cluster: Cluster, listener: socket.socket) -> None:
        self._cluster = cluster
        self._connected: set[int] = set()
        self._refusal: list[Any] = []  # Why nobody trains, and the exit code.
        self._values: dict[str, dict[int, Any]] = collections.defaultdict(dict)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_ignore_lack_of_files)
        # Done once no more values of a key are waited for.
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
        """Serves a worker's connection until it ends; ignores any other."""
        index = None
        with contextlib.closing(writer), contextlib.suppress(*_NO_WORKER):
            line = await asyncio.wait_for(reader.readline(), _SECONDS_TO_ANSWER)
            index = self._admit(json.loads(line), writer)
            while line:
                key, value, seconds = json.loads(line)
                if key == "refusal":
                    self._refusal = self._refusal or value
                elif key == _ARRIVAL:  # The others' addresses come from themselves.
                    value = value[1][index : index + 1]
                self._values[key][index] = value
                self._decide_complete()
                following = asyncio.ensure_future(reader.readline())
                either = (following, self._decisions[key])
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(either, timeout=seconds, return_when=first)
                if not following.done():  # It would have ended.
                    self._decide(key)
                    answer = _line([self._refusal, [*self._values[key].items()]])
                    if index == 0:  # The chief may end with its answer.
                        await asyncio.sleep(_SECONDS_UNTIL_OTHERS_KNOW)
                    writer.write(answer)
                line = await following
        if index in self._connected:
            self._connected.discard(index)
            if not self._decisions[_ARRIVAL].done():  # It is missing again.
                self._values[_ARRIVAL].pop(index, None)
            self._decide_complete()

    def _admit(self, greeting: Any, writer: asyncio.StreamWriter) -> int:
        """Registers a worker that has connected, and returns its index.

        A conflict with another worker makes every worker refuse to start.
        """
        key, (index, addresses), _ = greeting
        own = [worker.address for worker in self._cluster.workers]
        if key != _ARRIVAL or index not in range(len(own)):
            raise ValueError(greeting)
        connection = writer.get_extra_info("socket")
        both = zip(own, addresses, strict=False)
        problem = ""
        if len(own) != len(addresses) or any(a != b and a and b for a, b in both):
            problem = f"the workers were given different clusters: {own}, {addresses!a}"
        elif index in self._connected:
            host = connection.getpeername()[0].replace("::ffff:", "")
            place = f"{self._cluster.workers[index]}, and one on {host}"
            problem = f"two processes have the same index: {place}"
        if problem and not self._refusal:
            fix = "In TF_CONFIG, give all the same cluster and each its own index."
            self._refusal = [f"{problem}.\n{fix}", EXIT_USAGE]
        with contextlib.suppress(AttributeError, OSError):  # Only Linux has all of it.
            ports.limit_silence(connection)
        self._connected.add(index)
        return index

    def _decide_complete(self) -> None:
        """Ends the wait for each key with all its values; for all after a refusal."""
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
    """Ignores a lack of file descriptors, which strangers can cause for a while."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


def _line(value: Any) -> bytes:
    return f"{json.dumps(value, default=str)}\n".encode()


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers))
