"""Workers wait for one another, name who is missing, and share what they know."""

import contextlib
import errno
import json
import socket
import threading
import time

import pytest

from cifar10.distributed.cluster import Cluster, Worker
from cifar10.distributed.rendezvous import Rendezvous
from cifar10.errors import LostWorkerError, UnavailableError, UsageError

pytestmark = pytest.mark.usefixtures("connections_end")


@pytest.fixture
def workers():
    """Three workers on free ports of this machine."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(3)
        ]
        ports = [server.getsockname()[1] for server in servers]
    return tuple(Worker(index, f"127.0.0.1:{port}") for index, port in enumerate(ports))


class Caller(threading.Thread):
    """A worker that waits for the others, and may ask them for something then."""

    def __init__(self, workers, index, timeout=20.0, ask=lambda rendezvous: None):
        super().__init__(daemon=True)
        self._arguments = (Cluster(workers, index), timeout)
        self._ask = ask
        self.start()

    def run(self):
        self._end = None
        try:
            self._end = self._ask(Rendezvous(*self._arguments))
        except (LostWorkerError, UsageError) as error:
            self._end = error

    def end(self):
        """Returns what it was told, or its error."""
        self.join(60)
        assert not self.is_alive()
        return self._end


def assert_meet(workers, *waiting, indices=()):
    """Has the workers at some indices join those that wait; nobody is refused."""
    assert all(caller.is_alive() for caller in waiting), "they did not wait"
    last = [Caller(workers, index) for index in indices]
    assert [caller.end() for caller in (*waiting, *last)] == [None] * 3


@pytest.mark.parametrize(
    ("number", "in_kubernetes", "error"),
    [
        (socket.EAI_NONAME, False, UsageError),
        (socket.EAI_NONAME, True, LostWorkerError),  # Its pod may run later.
        (socket.EAI_AGAIN, False, LostWorkerError),  # The name server may answer later.
    ],
)
def test_a_host_that_is_unknown_to_the_end_is_a_mistake(
    monkeypatch, workers, number, in_kubernetes, error
):
    def look_up(*_, **__):
        raise socket.gaierror(number, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_kubernetes:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    named = (Worker(0, "no-such-host:2222"), *workers[1:])
    end = Caller(named, 1, timeout=0.5).end()
    assert type(end) is error
    assert "no-such-host:2222" in str(end)
    assert "not known" in str(end)


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
    line = json.dumps(["arrival", [index, addresses], 20.0])
    connection.sendall(f"{line}\n".encode())
    return connection


@pytest.mark.parametrize("late", [0, 2])
def test_all_are_let_go_once_the_last_has_come(workers, late):
    early = [Caller(workers, index) for index in range(3) if index != late]
    time.sleep(0.3)
    assert all(caller.is_alive() for caller in early), "they did not wait"
    met = Rendezvous(Cluster(workers, late), 20.0)
    assert met.cluster == Cluster(workers, late)
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
    elsewhere = (*workers[:2], Worker(2, "127.0.0.1:1"))
    callers = [Caller(workers, 0), Caller(elsewhere, 1)]
    for error in [caller.end() for caller in callers]:
        assert isinstance(error, UsageError)
        assert "127.0.0.1:1" in str(error)


def test_addresses_that_only_their_workers_know_are_shared(workers):
    """As under SLURM."""

    def ask(rendezvous):
        return rendezvous.cluster.workers

    callers = []
    for index in range(3):
        known = [
            one if one.index in (0, index) else Worker(one.index, "") for one in workers
        ]
        callers.append(Caller(tuple(known), index, ask=ask))
    assert [caller.end() for caller in callers] == [workers] * 3


def test_index_that_two_have_is_named_to_all(workers):
    """As where a TF_CONFIG is copied to another machine and not edited."""
    callers = [Caller(workers, 0, timeout=600)]
    with report(workers, 1), report(workers, 1) as twin:
        assert str(workers[1]) in read_line(twin)
        error = callers[0].end()
    assert isinstance(error, UsageError)
    assert f"index: {workers[1]}" in str(error)


def test_second_chief_is_named_by_both(workers, monkeypatch):
    create, callers = socket.create_server, [Caller(workers, 0, timeout=600)]
    call(workers[0]).close()

    def elsewhere(_address, **more):
        """Stands for the other machine, where the port is free."""
        return create(("", 0), **more)

    monkeypatch.setattr(socket, "create_server", elsewhere)
    callers.append(Caller(workers, 0, timeout=600))
    for error in [caller.end() for caller in callers]:
        assert isinstance(error, UsageError)
        assert f"index: {workers[0]}" in str(error)


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


def test_port_of_a_worker_that_waits_is_kept(workers):
    """Another program would take it from TensorFlow."""
    waiting = Caller(workers, 1)
    call(workers[1]).close()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(workers[1].host_and_port)
    assert_meet(workers, waiting, indices=[0, 2])


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


def test_lack_of_files_delays_workers_and_prints_nothing(workers, monkeypatch, caplog):
    """As while strangers hold all."""
    accept, failures = socket.socket.accept, iter(range(3))

    def fail_thrice(listener):
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_thrice)
    assert_meet(workers, indices=[0, 1, 2])
    assert next(failures, None) is None
    assert caplog.text == ""


def test_workers_meet_where_silence_has_no_limit(workers, monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    assert_meet(workers, indices=[0, 1, 2])


def test_what_else_answers_at_the_chiefs_port_is_not_read_to_its_end(workers):
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.create_server(workers[0].host_and_port))
        other.settimeout(20)
        waiting = Caller(workers, 1, timeout=60)
        for _ in range(2):  # It hangs up, and tries again.
            connection, _ = other.accept()
            with contextlib.suppress(ConnectionError):
                stack.enter_context(connection).sendall(b"[" * 2**24)
    assert_meet(workers, waiting, indices=[0, 2])


def test_worker_whose_numbers_are_out_of_range_is_hung_up_on(workers, caplog):
    chief = Caller(workers, 0)
    addresses = [worker.address for worker in workers]
    with call(workers[0]) as odd:
        line = json.dumps(["arrival", [1, addresses], 10**400])
        odd.sendall(f"{line}\n".encode())
        assert read_line(odd) == ""
    assert_meet(workers, chief, indices=[1, 2])
    assert caplog.text == ""


def test_only_those_with_a_place_are_workers(workers):
    chief = Caller(workers, 0)
    for index in ("1", [1], -1, 3, None):
        with report(workers, index) as caller:
            assert read_line(caller) == "", "it was not hung up on"
    assert_meet(workers, chief, indices=[1, 2])


def test_workers_of_one_machine_meet_where_no_other_can_call(workers):
    chief = Caller(workers, 0)
    call(workers[0]).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", workers[0].host_and_port[1]))
    assert_meet(workers, chief, indices=[1, 2])


def gather_all(workers, *asks):
    # None of them may end only because its wait does: `end` fails before that.
    callers = [Caller(workers, n, timeout=600, ask=ask) for n, ask in enumerate(asks)]
    return [caller.end() for caller in callers]


def test_all_get_the_values_of_all(workers):
    def ask(rendezvous):
        return rendezvous.gather("settings", [rendezvous.cluster.index, "é" * 200_000])

    (first, *others) = gather_all(workers, ask, ask, ask)
    assert [index for index, _ in first] == [0, 1, 2]
    assert others == [first, first]


@pytest.mark.parametrize("by", [0, 2])
@pytest.mark.parametrize("kind", [UsageError, UnavailableError])
def test_refusal_of_one_is_told_by_all(workers, by, kind):
    """And all end with the exit code on which a scheduler does the same with all."""

    def ask(rendezvous):
        if rendezvous.cluster.index == by:
            time.sleep(0.3)
            rendezvous.refuse(kind("a full disk"))
            return None
        return rendezvous.gather("settings", 1)

    ends = gather_all(workers, ask, ask, ask)
    assert ends.pop(by) is None
    for error in ends:
        assert (type(error), error.exit_code) == (kind, kind.exit_code)
        assert f"{workers[by]} refused to train: a full disk" in str(error)


@pytest.mark.parametrize("by", [0, 2])
def test_worker_that_ends_is_missed_at_once(workers, by):
    def ask(rendezvous):
        if rendezvous.cluster.index == by:
            # Closes the connection, as the end of the process does.
            rendezvous._connection.shutdown(socket.SHUT_RDWR)
            return None
        return rendezvous.gather("settings", 1)

    ends = gather_all(workers, ask, ask, ask)
    assert ends.pop(by) is None
    for error in ends:
        assert isinstance(error, LostWorkerError)
        assert str(workers[by]) in str(error)
