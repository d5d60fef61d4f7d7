"""What listens for workers of this machine alone is reached from it alone."""

import socket
from unittest import mock

import pytest

from cifar10.distributed import ports, workers
from cifar10.distributed.cluster import Cluster

LINUX = pytest.mark.skipif(
    not hasattr(socket, "SO_BINDTODEVICE"), reason="only Linux confines open sockets"
)


@pytest.fixture
def everywhere():
    """A port at all addresses, as TensorFlow's server opens it."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
        yield server


def port_of(server):
    return server.getsockname()[1]


def device_of(server):
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)


@LINUX
def test_open_port_is_confined_and_no_other(everywhere):
    with socket.create_server(("", 0)) as other:
        other_port = port_of(other)
        assert ports.confine(port_of(everywhere))
        assert device_of(everywhere) == b"lo\0"
        assert device_of(other) == b""
    assert not ports.confine(other_port), "it is closed"
    with socket.create_connection(("127.0.0.1", port_of(everywhere))) as caller:
        called, _ = everywhere.accept()
        with called:
            assert ports.confine(port_of(everywhere))
            caller.sendall(b"still connected")
            assert called.recv(100) == b"still connected"


def test_port_that_stays_open_to_the_network_is_told(monkeypatch, capsys):
    """Only where all workers are on this machine; others have to be reached."""
    confined, made = [], mock.Mock()
    for module, name, stub in (
        (workers.context, "context", mock.Mock()),
        (workers.tf.distribute, "MultiWorkerMirroredStrategy", made),
        (workers.ports, "confine", confined.append),
    ):
        monkeypatch.setattr(module, name, stub)
    for host, gpus, told in (("a", 2, []), ("127.0.0.1", 0, [2])):
        addresses = [f"{host}:{number}" for number in (1, 2)]
        workers.connect_cluster(Cluster.at(addresses, 1), gpus=gpus)
        options = made.call_args.kwargs["communication_options"]
        assert options.implementation.name == ("NCCL" if gpus else "RING")
        assert confined == told
        assert ("port 2" in capsys.readouterr().err) is bool(told)
