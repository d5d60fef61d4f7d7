"""Whom a worker cannot reach while a step hangs, and who is only slow or gone."""

import contextlib
import socket
import threading

import pytest

from cifar10.distributed import probe
from cifar10.distributed.cluster import Cluster, Worker


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(probe, "SECONDS_TO_ANSWER", 0.2)
    monkeypatch.setattr(probe, "SECONDS_BETWEEN", 0.01)


@pytest.fixture
def ports():
    """Three ports that answer, with room for one caller who waits."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(3)
        ]
        yield servers


def probe_of(ports):
    """The probe of the first of the workers at these ports, and all workers."""
    workers = tuple(
        Worker("worker", task, f"localhost:{one.getsockname()[1]}")
        for task, one in enumerate(ports)
    )
    found = probe.Probe(Cluster(workers, 0))
    for one in ports[1:]:
        one.accept()[0].close()  # Of the probe, which has looked whether it answers.
    return found, workers


@contextlib.contextmanager
def silent(port):
    """Has a port not answer, as if its cable were cut: Linux drops what has no room."""
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(port.getsockname())
        yield


def test_workers_that_answer_are_reached(ports):
    found, _ = probe_of(ports)
    assert found.unreachable() == []


def test_the_one_that_does_not_answer_is_named(ports):
    found, workers = probe_of(ports)
    with silent(ports[2]):
        assert found.unreachable() == [workers[2]]


def test_one_that_answers_again_is_reached(ports, monkeypatch):
    """As after an interruption that TensorFlow's connections survive."""
    monkeypatch.setattr(probe, "TIMES", 100)
    found, _ = probe_of(ports)

    def answer():
        for _ in range(2):
            ports[1].accept()[0].close()

    later = threading.Timer(0.5, answer)
    with silent(ports[1]):
        later.start()
        assert found.unreachable() == []
        later.join()


def test_one_that_has_ended_is_not_cut_off(ports):
    """As others that are done while the chief still saves."""
    found, _ = probe_of(ports)
    ports[1].close()
    assert found.unreachable() == []


def test_one_that_never_answered_is_not_missed(ports):
    """As behind a firewall that lets it call but not be called."""
    workers = tuple(
        Worker("worker", task, f"127.0.0.1:{one.getsockname()[1]}")
        for task, one in enumerate(ports)
    )
    with silent(ports[2]):
        found = probe.Probe(Cluster(workers, 0))
        ports[1].accept()[0].close()
        assert found.unreachable() == []
