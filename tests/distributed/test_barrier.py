"""Workers wait for one another before TensorFlow does, and name who is missing."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

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


SECRET = b"said by nobody else"


class Caller(threading.Thread):
    """A worker that waits for the others; `outcome` is its error, or None."""

    def __init__(self, workers, index, timeout=20.0, secret=SECRET):
        super().__init__(daemon=True)
        self._arguments = (Cluster(workers, index, secret), timeout)
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


def test_they_meet_where_a_loop_already_runs(workers):
    """As in a notebook."""

    async def cell(index):
        barrier.wait_for_all(Cluster(workers, index, SECRET), 20.0)

    callers = [Caller(workers, 2)]
    for index in (0, 1):
        callers.append(threading.Thread(target=asyncio.run, args=[cell(index)]))
        callers[-1].start()
    for caller in callers:
        caller.join(15)
    assert [caller.is_alive() for caller in callers] == [False] * 3
    assert callers[0].outcome is None


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


@pytest.mark.parametrize("index", [0, 1])
def test_the_same_index_twice_is_named_by_both(workers, monkeypatch, index):
    """As where a TF_CONFIG is copied to another machine and not edited."""
    bind, pair = barrier._bind, workers[:2]
    caller = Caller(pair, index, timeout=600)
    call(pair[index].host_and_port).close()
    monkeypatch.setattr(barrier, "_bind", lambda _: bind(Cluster(workers, 2)))
    copy = Caller(pair, index, timeout=600)
    for error in (caller.end(), copy.end()):
        assert isinstance(error, UsageError)
        assert f"the same index: {pair[index]}" in str(error)


def test_a_worker_that_died_while_it_waited_is_missing_again(workers):
    chief = Caller(workers, 0, timeout=4.0)
    with reports(workers, 1):
        time.sleep(0.5)
    other = Caller(workers, 2)
    for error in (chief.end(), other.end()):
        assert f"{workers[1]} did not arrive" in str(error)


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
        b"[" * 70_000 + b"\n",
        b"0" * 64 + b" 1 2 3\n",
        b"\xed\xa0\x80 1 2 3\n",
    ):
        with call(workers[0].host_and_port) as one:
            one.sendall(greeting)
    time.sleep(0.5)
    assert all(one.is_alive() for one in callers)
    callers.append(Caller(workers, 2))
    assert [one.end() for one in callers] == [None, None, None]


def read_line(connection):
    with connection.makefile("rb") as file:
        return file.readline().decode().strip()


def reports(workers, index, *, secret=SECRET):
    """Calls the chief as a worker would; returns the open connection."""
    connection = call(workers[0].host_and_port)
    challenge = read_line(connection).removeprefix("cifar10 worker:")
    addresses = ",".join(worker.address for worker in workers)
    report = f"challenge 0 {index} {addresses}"
    caller = Cluster(workers, 1, secret)
    connection.sendall(barrier._signed(caller, f"worker {challenge}", report))
    return connection


def test_only_the_places_that_are_free_are_workers(workers):
    """Also of somebody who knows the secret, as a worker of another version."""
    chief = Caller(workers, 0)
    for index in ("True", "1.0", "-1", "3", "01", "1e0", "[" * 9):
        with reports(workers, index) as one:
            assert read_line(one) == "", "it was not hung up on"
    assert chief.is_alive()
    others = [Caller(workers, 1), Caller(workers, 2)]
    assert [one.end() for one in [chief, *others]] == [None, None, None]


def test_whoever_does_not_know_the_secret_is_no_worker(workers):
    chief = Caller(workers, 0)
    for wrong in (b"", b"another one"):
        for index in (1, 2):
            with reports(workers, index, secret=wrong) as one:
                assert read_line(one) == ""
    assert chief.is_alive()
    others = [Caller(workers, 1), Caller(workers, 2)]
    assert [one.end() for one in [chief, *others]] == [None, None, None]


def test_a_chief_that_does_not_know_the_secret_is_not_believed(workers):
    """Not even one that sends back what the worker has just proven."""
    with socket.create_server(workers[0].host_and_port) as server:
        caller = Caller(workers, 1, timeout=1.0)
        for context in ("worker 1", "chief 1"):
            one, _ = server.accept()
            with one:
                one.sendall(b"cifar10 worker:1\n")
                proof, challenge, *_ = read_line(one).split()
                refusal = "worker 2 did not arrive"
                stranger = Cluster(workers, 0)
                one.sendall(barrier._signed(stranger, f"chief {challenge}", refusal))
                one.sendall(f"{proof} {context}\n".encode())
    error = str(caller.end())
    assert f"{workers[0]} did not arrive" in error
    assert "CIFAR10_WORKER_SECRET" in error


def test_without_a_secret_they_meet_and_it_is_said_once(workers, capsys):
    callers = [Caller(workers, index, secret=b"") for index in range(3)]
    assert [one.end() for one in callers] == [None, None, None]
    assert capsys.readouterr().err.count("without CIFAR10_WORKER_SECRET") == 1


def test_silent_and_endless_callers_keep_no_worker_waiting(workers, monkeypatch):
    monkeypatch.setattr(barrier, "_SECONDS_TO_ANSWER", 1e6)
    chief = Caller(workers, 0)
    silent = [call(workers[0].host_and_port) for _ in range(20)]
    endless = call(workers[0].host_and_port)
    flood = b"[" * 2**18
    sender = threading.Thread(target=send, args=(endless, flood), daemon=True)
    sender.start()
    time.sleep(0.3)
    others = [Caller(workers, 1), Caller(workers, 2)]
    # The silent ones are never hung up on, so nobody who waited for one would return.
    assert [one.end(60) for one in [chief, *others]] == [None, None, None]
    for one in [*silent, endless]:
        one.close()
    sender.join(5)


def test_who_is_silent_until_the_end_leaves_no_traceback(workers, caplog):
    chief = Caller(workers, 0)
    with call(workers[0].host_and_port):
        others = [Caller(workers, 1), Caller(workers, 2)]
        assert [one.end() for one in [chief, *others]] == [None, None, None]
    assert caplog.text == ""


def send(connection, data):
    with contextlib.suppress(OSError):
        connection.sendall(data)


def test_workers_of_one_machine_meet_where_no_other_can_call(workers):
    chief = Caller(workers, 0)
    call(workers[0].host_and_port).close()
    (listening,) = listening_at(workers[0].host_and_port[1])
    assert listening == "0100007F", "127.0.0.1, as /proc/net/tcp writes it"
    others = [Caller(workers, 1), Caller(workers, 2)]
    assert [one.end() for one in [chief, *others]] == [None, None, None]


def listening_at(port):
    """Returns the addresses at which a port of this machine listens."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if int(number, 16) == port and line.split()[3] == "0A":
                found.append(address)
    return found


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
