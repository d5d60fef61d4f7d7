"""Workers wait for one another, name who is missing, and end if that is in vain."""

import contextlib
import socket
import threading
import time

import pytest

from cifar10.distributed import rendezvous
from cifar10.distributed.cluster import Cluster
from cifar10.errors import LostWorkerError, UsageError


@pytest.fixture
def addresses():
    """The addresses of three workers, on free ports of this machine."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(3)
        ]
        ports = [server.getsockname()[1] for server in servers]
    return tuple(f"127.0.0.1:{port}" for port in ports)


class Caller(threading.Thread):
    """A worker that waits for the others."""

    def __init__(self, addresses, index, timeout=20.0):
        super().__init__(daemon=True)
        self._arguments = (Cluster(addresses, index), timeout)
        self.start()

    def run(self):
        self._error = None
        try:
            rendezvous.meet(*self._arguments)
        except (LostWorkerError, UsageError) as error:
            self._error = error

    def end(self):
        """Returns its error, or None if all have come."""
        self.join(60)
        assert not self.is_alive()
        return self._error


def call(address):
    """Connects as soon as a worker listens."""
    host, _, port = address.partition(":")
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)))
        time.sleep(0.05)
    return socket.create_connection((host, int(port)))


def report(addresses, text):
    """Calls the chief as a worker would; returns the open connection."""
    connection = call(addresses[0])
    connection.sendall(len(text).to_bytes(4, "big") + text)
    return connection


def assert_meet(addresses, *waiting, indices=()):
    """Has the workers at some indices join those that wait; all are let go."""
    assert all(caller.is_alive() for caller in waiting), "they did not wait"
    last = [Caller(addresses, index) for index in indices]
    assert [caller.end() for caller in (*waiting, *last)] == [None] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_all_workers_proceed_once_the_last_arrives(addresses, late):
    early = [Caller(addresses, index) for index in range(3) if index != late]
    time.sleep(0.3)
    assert_meet(addresses, *early, indices=[late])
    for address in addresses:  # The ports are free again for TensorFlow.
        host, _, port = address.partition(":")
        socket.create_server((host, int(port))).close()


def test_absent_worker_is_named_by_the_chief(addresses, capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SECONDS_BETWEEN_NOTICES", 0.2)
    callers = [Caller(addresses, 0, timeout=1.0), Caller(addresses, 1, timeout=1.0)]
    chief, other = (str(caller.end()) for caller in callers)
    assert f"waiting for worker 2 at {addresses[2]}" in chief
    assert "worker 1" not in chief
    assert f"waiting for worker 0 at {addresses[0]}" in other
    assert f"is waiting for worker 2 at {addresses[2]}." in capsys.readouterr().err


def test_a_worker_dying_while_it_waits_is_missing_again(addresses):
    chief = Caller(addresses, 0, timeout=1.5)
    with report(addresses, b"1"):
        time.sleep(0.2)
    with report(addresses, b"2"):
        assert "waiting for worker 1" in str(chief.end())


def test_a_restarted_worker_is_present(addresses):
    chief = Caller(addresses, 0)
    with report(addresses, b"1"):
        time.sleep(0.2)
    assert_meet(addresses, chief, indices=[1, 2])


def test_a_duplicate_index_leaves_a_worker_missing(addresses):
    chief = Caller(addresses, 0, timeout=1.5)
    with report(addresses, b"1"), report(addresses, b"1") as twin:
        call(addresses[0]).close()  # The chief hangs up on one when the next one calls.
        assert twin.recv(1) == b""
        assert chief.is_alive(), "it was hung up on only at the end"
        error = chief.end()
    assert isinstance(error, LostWorkerError)
    assert "waiting for worker 2" in str(error)
    assert "a different index" in str(error)


def test_port_in_use_is_named(addresses):
    _, _, port = addresses[1].partition(":")
    with socket.create_server(("", int(port))):
        error = Caller(addresses, 1).end()
    assert isinstance(error, UsageError)
    assert f"port {port}" in str(error)


def test_a_waiting_worker_keeps_its_port(addresses):
    """Another program would take it from TensorFlow."""
    waiting = Caller(addresses, 1)
    call(addresses[1]).close()
    _, _, port = addresses[1].partition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", int(port)))
    assert_meet(addresses, waiting, indices=[0, 2])


def test_strangers_at_the_port_do_not_block_the_workers(addresses, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_SEND", 0.2)
    callers = [Caller(addresses, index) for index in range(2)]
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # They say nothing.
            stack.enter_context(call(addresses[0]))
        stack.enter_context(call(addresses[0])).sendall(b"GET / HTTP/1.1\r\n\r\n")
        for text in (b"one", b"-1", b"3", b"0", b"\xff"):
            stack.enter_context(report(addresses, text))
        assert_meet(addresses, *callers, indices=[2])


@pytest.mark.parametrize("start", [b"\0", b"\0\0\0\1", b"\xff" * 4])
def test_an_incomplete_message_does_not_block_the_workers(
    addresses, monkeypatch, start
):
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_SEND", 1)
    chief = Caller(addresses, 0)
    with call(addresses[0]) as stranger:
        stranger.sendall(start)
        assert_meet(addresses, chief, indices=[1, 2])


def test_a_chief_with_an_incomplete_reply_is_missing(addresses, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_SEND", 1)
    host, _, port = addresses[0].partition(":")
    with socket.create_server((host, int(port))) as other:
        other.settimeout(20)
        waiting = Caller(addresses, 1, timeout=1.0)
        with other.accept()[0] as connection:
            connection.sendall(b"\0\0")
            assert "waiting for worker 0" in str(waiting.end())


def test_another_program_at_the_chiefs_port_is_not_the_chief(addresses):
    host, _, port = addresses[0].partition(":")
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.create_server((host, int(port))))
        other.settimeout(20)
        waiting = Caller(addresses, 1, timeout=60)
        for answer in (b"[" * 2**14, b"\0\0\0\1."):  # It hangs up, and tries again.
            connection, _ = other.accept()
            with contextlib.suppress(ConnectionError):
                stack.enter_context(connection).sendall(answer)
    assert_meet(addresses, waiting, indices=[0, 2])
