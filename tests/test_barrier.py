"""Workers wait for one another before TensorFlow does, and name who is missing."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from cifar10.distributed import barrier
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError


@pytest.fixture
def workers():
    """Three workers on free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return tuple(
        Worker("worker", task, f"127.0.0.1:{port}") for task, port in enumerate(ports)
    )


class Caller(threading.Thread):
    """A worker that waits for the others; `outcome` is its error, or None."""

    def __init__(self, workers, index, timeout=20.0):
        super().__init__(daemon=True)
        self._arguments = (Cluster(workers, index), timeout)
        self.start()

    def run(self):
        self.outcome = None
        try:
            barrier.wait_for_all(*self._arguments)
        except (LostWorkerError, UsageError) as error:
            self.outcome = error

    def end(self, timeout=15):
        self.join(timeout)
        assert not self.is_alive()
        return self.outcome


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_are_let_go_once_the_last_has_come(workers, late):
    early = [Caller(workers, index) for index in range(3) if index != late]
    time.sleep(0.8)
    assert all(one.is_alive() for one in early), "they did not wait"
    last = Caller(workers, late)
    assert [one.end() for one in [*early, last]] == [None, None, None]
    # The ports are free again for TensorFlow.
    for worker in workers:
        socket.create_server(worker.host_and_port).close()


def test_who_does_not_come_is_named_to_all(workers):
    chief, other = Caller(workers, 0, timeout=1.5), Caller(workers, 1)
    for error in (chief.end(), other.end()):
        assert isinstance(error, LostWorkerError)
        assert f"{workers[2]} did not arrive within 1.5 s" in str(error)
        assert str(workers[1]) not in str(error).partition(": ")[2]


def test_an_absent_chief_is_named(workers):
    error = Caller(workers, 2, timeout=1.0).end()
    assert isinstance(error, LostWorkerError)
    assert f"{workers[0]} did not arrive within 1 s" in str(error)


def test_workers_that_disagree_about_the_cluster_are_refused(workers):
    elsewhere = (*workers[:2], Worker("worker", 2, "127.0.0.1:1"))
    callers = [Caller(workers, 0), Caller(elsewhere, 1)]
    for error in [one.end() for one in callers]:
        assert isinstance(error, UsageError)
        assert "127.0.0.1:1" in str(error)


def test_a_port_that_is_taken_is_named(workers):
    with socket.create_server(workers[1].host_and_port):
        error = Caller(workers, 1).end()
    assert isinstance(error, UsageError)
    assert workers[1].address.rpartition(":")[2] in str(error)
    assert "in use" in str(error)


def call(address):
    """Connects as soon as somebody listens."""
    for _ in range(100):
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)
    return socket.create_connection(address)


def test_a_stranger_at_the_port_is_no_worker(workers):
    callers = [Caller(workers, index) for index in range(2)]
    for greeting in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        b"\x00\xff\n",
        b"[1]\n",
        b"[[1], 2]\n",
    ):
        with call(workers[0].host_and_port) as one:
            one.sendall(greeting)
    time.sleep(0.5)
    assert all(one.is_alive() for one in callers)
    callers.append(Caller(workers, 2))
    assert [one.end() for one in callers] == [None, None, None]


def test_an_answer_that_is_not_the_chiefs_is_not_believed(workers):
    """As that of a training whose last worker is just being started again."""
    with socket.create_server(workers[0].host_and_port) as stranger:
        caller = Caller(workers, 1)
        one, _ = stranger.accept()
        with one:
            one.sendall(b"\x00\x00\x12\x04\x00\n")
        time.sleep(0.3)
        assert caller.is_alive()
    others = [Caller(workers, 0), Caller(workers, 2)]
    assert [one.end() for one in [caller, *others]] == [None, None, None]


def test_a_process_that_is_never_connected_is_ended_with_a_sentence():
    """TensorFlow holds Python's lock meanwhile, so no thread could do it."""
    program = (
        "from cifar10.distributed import barrier\n"
        "from cifar10.distributed.cluster import Cluster, Worker\n"
        "import time\n"
        "barrier.SECONDS_TO_CONNECT = 0.5\n"
        "pair = (Worker('worker', 0, 'a:1'), Worker('worker', 1, 'b:1'))\n"
        "with barrier.guarded(Cluster(pair, 0)):\n"
        "    pass\n"
        "time.sleep(1)\n"
        "print('connected in time', flush=True)\n"
        "with barrier.guarded(Cluster(pair, 0)):\n"
        "    time.sleep(30)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert ended.stdout == "connected in time\n"
    assert ended.returncode == -9
    assert "worker 0 at a:1 was not connected to worker 1 at b:1" in ended.stderr
