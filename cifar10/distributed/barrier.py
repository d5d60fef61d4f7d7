"""Waits until all workers of a training have come, before TensorFlow does.

TensorFlow waits for the others in a call that holds Python's lock: no signal, no thread
and no timeout of Python's gets through, and nobody is told who is missing. So the
workers first meet at the chief's address by plain sockets, and let go of it again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError, reason

_GO = "go"
_NO = "no: "
_DISAGREE = "the workers disagree about who they are"
_SECONDS_UNTIL_SAID = 5.0
# What is left once all have come takes a second or two.
SECONDS_TO_CONNECT = 60

# Ends its parent unless its input is closed in time.
_GUARD = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[2].encode())
    os.kill(os.getppid(), 9)
"""


def wait_for_all(cluster: Cluster, timeout: float) -> None:
    """Waits for the other workers.

    Args:
        cluster: The workers.
        timeout: Seconds to wait.

    Raises:
        UsageError: This worker's port is taken, or the workers disagree about who they
            are.
        LostWorkerError: Some have not come.
    """
    with _bound(cluster.own) as listening:
        if cluster.is_chief:
            _call(cluster, listening, timeout)
    if not cluster.is_chief:
        _answer(cluster, timeout)


@contextlib.contextmanager
def guarded(cluster: Cluster) -> Iterator[None]:
    """Ends this process, with a sentence, if TensorFlow does not connect the workers.

    A firewall between two of them can be the cause. It takes another process to notice.
    """
    message = (
        f"{cluster.own} was not connected to {_names(cluster.others)} within "
        f"{SECONDS_TO_CONNECT} s although all had come. Check that every worker can "
        "reach every other's address.\n"
    )
    command = [sys.executable, "-S", "-E", "-c", _GUARD, str(SECONDS_TO_CONNECT)]
    guard = subprocess.Popen([*command, message], stdin=subprocess.PIPE)  # noqa: S603
    try:
        yield
    finally:
        guard.communicate()


@contextlib.contextmanager
def _bound(own: Worker) -> Iterator[socket.socket]:
    """Takes this worker's port, to see that it is free."""
    _, port = own.host_and_port
    try:
        # All addresses of the machine, of both versions of IP where there are two.
        both = socket.has_dualstack_ipv6()
        listening = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise UsageError(
            f"{own}: port {port} of this machine cannot be used: {reason(error)}. End "
            "the process that has it, or give another port in TF_CONFIG."
        ) from error
    with listening:
        yield listening


def _call(cluster: Cluster, listening: socket.socket, timeout: float) -> None:
    """Waits, as the chief, until each worker has called, and lets them go."""
    began = time.monotonic()
    said = False
    with contextlib.ExitStack() as open_files:
        came: dict[int, socket.socket] = {}
        refusal = ""
        while not refusal and (missing := _missing(cluster, came)):
            waited = time.monotonic() - began
            if waited > timeout:
                refusal = f"{_names(missing)} did not come within {timeout:g} s"
            elif waited > _SECONDS_UNTIL_SAID and not said:
                said = True
                _say(f"{cluster.own} is waiting for {_names(missing)}.")
            listening.settimeout(0.5)
            with contextlib.suppress(OSError):
                one, _ = listening.accept()
                open_files.enter_context(one)
                one.settimeout(5)
                call = _read_call(one)
                if call is None:
                    continue
                index, addresses = call
                if addresses != _addresses(cluster):
                    refusal = f"{_DISAGREE}: {_addresses(cluster)} and {addresses}"
                came[index] = one
        for one in came.values():
            with contextlib.suppress(OSError):
                answer = f"{_NO}{refusal}" if refusal else _GO
                one.sendall(f"{answer}\n".encode())
                _line(one)  # Who closes first keeps the port for a while.
    if refusal:
        raise _refused(cluster, refusal)


def _answer(cluster: Cluster, timeout: float) -> None:
    """Calls at the chief until it answers, and waits to be let go."""
    chief = cluster.workers[0]
    began = time.monotonic()
    said = False
    while True:
        waited = time.monotonic() - began
        with contextlib.suppress(OSError):
            one = socket.create_connection(chief.host_and_port, timeout=2)
            with one:
                # The chief's own patience may have begun later.
                one.settimeout(timeout + 10)
                call = json.dumps([cluster.index, _addresses(cluster)])
                one.sendall(f"{call}\n".encode())
                answer = _line(one)
            if answer == _GO:
                return
            if answer.startswith(_NO):  # Else it was not the chief that answered.
                raise _refused(cluster, answer.removeprefix(_NO))
        if waited > timeout:
            raise _refused(cluster, f"{chief} did not come within {timeout:g} s")
        if waited > _SECONDS_UNTIL_SAID and not said:
            said = True
            _say(f"{cluster.own} is waiting for {chief}.")
        time.sleep(0.3)


def _refused(cluster: Cluster, why: str) -> Exception:
    if why.startswith(_DISAGREE):
        return UsageError(f"{why}. Give all the same cluster in TF_CONFIG.")
    return LostWorkerError(
        f"{cluster.own} has waited in vain: {why}. Start them, check the addresses in "
        "TF_CONFIG and the firewall, or wait longer with --worker_timeout."
    )


def _read_call(one: socket.socket) -> tuple[int, list] | None:
    """Reads who calls; None if it is a port scanner, or a worker that was killed."""
    try:
        index, addresses = json.loads(_line(one))
    except (ValueError, TypeError):
        return None
    if not isinstance(index, int) or not isinstance(addresses, list):
        return None
    return index, addresses


def _missing(cluster: Cluster, came: dict[int, socket.socket]) -> list[Worker]:
    return [
        worker
        for index, worker in enumerate(cluster.workers)
        if index and index not in came
    ]


def _addresses(cluster: Cluster) -> list[str]:
    return [worker.address for worker in cluster.workers]


def _names(workers: list[Worker]) -> str:
    return ", ".join(map(str, workers))


def _line(one: socket.socket) -> str:
    """Reads to the end of a line, or of the connection."""
    with one.makefile("rb") as file:
        return file.readline(65_536).decode(errors="replace").strip()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
