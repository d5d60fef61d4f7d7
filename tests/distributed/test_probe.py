"""Whom a worker cannot reach while a step hangs, and who is only slow or gone."""

import contextlib
import socket

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
        yield [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(3)
        ]


def probe_of(ports, answering=(1, 2)):
    """Returns the probe of the first of the workers at these ports, and all workers."""
    workers = tuple(
        Worker("worker", task, f"localhost:{port.getsockname()[1]}")
        for task, port in enumerate(ports)
    )
    found = probe.Probe(Cluster(workers, 0))
    for index in answering:
        ports[index].accept()[0].close()  # Of the probe, which has called it once.
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


def test_silent_worker_is_named(ports):
    found, workers = probe_of(ports)
    assert found.unreachable() == []
    ports[1].accept()[0].close()
    ports[2].accept()[0].close()
    with silent(ports[2]):
        assert found.unreachable() == [workers[2]]


def test_worker_that_has_ended_is_not_cut_off(ports):
    """As others that are done while the chief still saves."""
    found, _ = probe_of(ports)
    ports[1].close()
    assert found.unreachable() == []


def test_worker_that_never_answered_is_not_missed(ports):
    """As behind a firewall that lets it call but not be called."""
    with silent(ports[2]):
        found, _ = probe_of(ports, answering=[1])
        assert found.unreachable() == []
