"""Workers wait for one another before TensorFlow does, and name who is missing."""

import contextlib
import json
import socket
import threading
import time

import pytest

import runs
from cifar10.distributed import barrier
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError


@pytest.fixture
def workers():
    """Three workers on free ports of this machine."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(3)
        ]
        ports = [server.getsockname()[1] for server in servers]
    return tuple(
        Worker("worker", task, f"127.0.0.1:{port}") for task, port in enumerate(ports)
    )


class Caller(threading.Thread):
    """A worker that waits for the others."""

    def __init__(self, workers, index, timeout=20.0):
        super().__init__(daemon=True)
        self._arguments = (Cluster(workers, index), timeout)
        self.start()

    def run(self):
        self._error = None
        try:
            barrier.wait_for_all(*self._arguments)
        except (LostWorkerError, UsageError) as error:
            self._error = error

    def end(self):
        """Returns its error, or None."""
        self.join(60)
        assert not self.is_alive()
        return self._error


def assert_meet(workers, *waiting, indices=()):
    """Has the workers at some indices join those that wait; nobody is refused."""
    assert all(caller.is_alive() for caller in waiting), "they did not wait"
    last = [Caller(workers, index) for index in indices]
    assert [caller.end() for caller in (*waiting, *last)] == [None] * 3


def call(worker):
    """Connects as soon as a worker listens."""
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(worker.host_and_port)
        time.sleep(0.05)
    return socket.create_connection(worker.host_and_port)


def read_line(connection):
    with connection.makefile("rb") as file:
        return file.readline().decode().strip()


def report(workers, index):
    """Calls the chief as a worker would; returns the open connection."""
    connection = call(workers[0])
    addresses = [worker.address for worker in workers]
    line = json.dumps([0, index, "a process", addresses, ""])
    connection.sendall(f"{line}\n".encode())
    return connection


@pytest.mark.parametrize("late", [0, 2])
def test_all_are_let_go_once_the_last_has_come(workers, late):
    early = [Caller(workers, index) for index in range(3) if index != late]
    time.sleep(0.3)
    assert all(caller.is_alive() for caller in early), "they did not wait"
    barrier.wait_for_all(Cluster(workers, late), 20.0)
    assert [caller.end() for caller in early] == [None, None]
    for worker in workers:  # The ports are free again for TensorFlow.
        socket.create_server(worker.host_and_port).close()


def test_absent_worker_is_named_to_all(workers):
    callers = [Caller(workers, 0, 1.0), Caller(workers, 1)]
    for error in [caller.end() for caller in callers]:
        assert isinstance(error, LostWorkerError)
        _, _, named = str(error).partition(": ")
        assert str(workers[2]) in named
        assert str(workers[1]) not in named


def test_workers_that_disagree_about_the_cluster_are_refused(workers):
    elsewhere = (*workers[:2], Worker("worker", 2, "127.0.0.1:1"))
    callers = [Caller(workers, 0), Caller(elsewhere, 1)]
    for error in [caller.end() for caller in callers]:
        assert isinstance(error, UsageError)
        assert "127.0.0.1:1" in str(error)


@pytest.mark.parametrize(
    ("early", "index", "late"), [((), 0, ()), ((0,), 1, ()), ((), 1, (0,))]
)
def test_index_that_two_have_is_named_by_both(workers, monkeypatch, early, index, late):
    """As where a TF_CONFIG is copied to another machine and not edited.

    And by the chief, even if it comes last: it would wait for the missing third until
    its limit.
    """
    create = socket.create_server
    callers = [Caller(workers, place, timeout=600) for place in (*early, index)]
    call(workers[index]).close()
    bound = threading.Event()

    def elsewhere(_address, **more):
        """Stands for the other machine, where the port is free."""
        bound.set()
        return create(("", 0), **more)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", elsewhere)
        callers.append(Caller(workers, index, timeout=600))
        assert bound.wait(60)
    if late:
        callers[-1].join(60)  # It has found the other by then.
    callers += [Caller(workers, place, timeout=600) for place in late]
    for error in [caller.end() for caller in callers]:
        assert isinstance(error, UsageError)
        assert f"index: {workers[index]}" in str(error)


def test_worker_that_died_while_it_waited_is_missing_again(workers):
    chief = Caller(workers, 0, timeout=1.5)
    with report(workers, 1):
        time.sleep(0.2)
    other = Caller(workers, 2)
    for error in (chief.end(), other.end()):
        assert str(workers[1]) in str(error)


def test_port_in_use_is_named(workers):
    with socket.create_server(workers[1].host_and_port):
        error = Caller(workers, 1).end()
    assert isinstance(error, UsageError)
    assert str(workers[1].host_and_port[1]) in str(error)


def test_strangers_at_the_port_keep_no_worker_waiting(workers, caplog):
    callers = [Caller(workers, index) for index in range(2)]
    with contextlib.ExitStack() as stack:
        # Each would be waited for 5 seconds.
        *_, endless = [stack.enter_context(call(workers[0])) for _ in range(21)]
        endless.sendall(b"[" * 2**14)
        odd = (b"GET / HTTP/1.1\r\n\r\n", b"\xed\xa0\x80\n", b"abcde\n", b"[" * 9999)
        for greeting in odd:
            stack.enter_context(call(workers[0])).sendall(greeting)
        assert_meet(workers, *callers, indices=[2])
    assert caplog.text == ""


def test_only_those_with_a_place_are_workers(workers):
    chief = Caller(workers, 0)
    for index in ("1", [1], -1, 3):
        with report(workers, index) as caller:
            assert read_line(caller) == "", "it was not hung up on"
    assert_meet(workers, chief, indices=[1, 2])


def test_workers_of_one_machine_meet_where_no_other_can_call(workers):
    chief = Caller(workers, 0)
    call(workers[0]).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", workers[0].host_and_port[1]))
    assert_meet(workers, chief, indices=[1, 2])


def test_process_that_is_never_connected_is_ended_with_a_message():
    """TensorFlow holds Python's lock meanwhile, so no thread could do it."""
    program = (
        "from cifar10.distributed import barrier\n"
        "from cifar10.distributed.cluster import Cluster, Worker\n"
        "import time\n"
        "barrier.SECONDS_TO_CONNECT = 0.4\n"
        "pair = (Worker('worker', 0, 'a:1'), Worker('worker', 1, 'b:1'))\n"
        "with barrier.guarded(Cluster(pair, 0)):\n"
        "    pass\n"
        "time.sleep(0.6)\n"
        "print('connected in time', flush=True)\n"
        "with barrier.guarded(Cluster(pair, 0)):\n"
        "    time.sleep(30)\n"
    )
    ended = runs.run("-c", program)
    assert ended.stdout == "connected in time\n"
    assert ended.returncode == -9
    assert "worker 1 at b:1" in ended.stderr
