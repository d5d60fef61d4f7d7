"""What listens for workers of this machine alone is reached from it alone."""

import socket
from unittest import mock

import pytest

import runs
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


@LINUX
def test_only_connections_of_workers_are_limited(everywhere):
    def is_limited(connection):
        option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        return connection.getsockopt(*option) > 0

    with (
        socket.create_server(("127.0.0.1", 0)) as theirs,
        socket.create_server(("127.0.0.1", 0)) as stranger,
        socket.create_connection(theirs.getsockname()) as to_them,
        socket.create_connection(("127.0.0.1", port_of(everywhere))) as caller,
        socket.create_connection(stranger.getsockname()) as elsewhere,
    ):
        called, _ = everywhere.accept()
        with called:
            addresses = [f"127.0.0.1:{port_of(one)}" for one in (everywhere, theirs)]
            ports.limit_silence_of(Cluster.at(addresses, 0))
            limited = [is_limited(one) for one in (to_them, called, elsewhere, caller)]
    assert limited == [True, True, False, False]


def test_process_that_is_never_connected_is_ended_with_a_message():
    """TensorFlow holds Python's lock meanwhile, so no thread could do it."""
    program = (
        "from cifar10.distributed import workers\n"
        "from cifar10.distributed.cluster import Cluster\n"
        "import time\n"
        "cluster = Cluster.at(['a:1', 'b:1'], 0)\n"
        "with workers.guarded(cluster, 0.4):\n"
        "    pass\n"
        "time.sleep(0.6)\n"
        "print('connected in time', flush=True)\n"
        "with workers.guarded(cluster, 0.4):\n"
        "    time.sleep(30)\n"
    )
    ended = runs.run("-c", program)
    assert ended.stdout == "connected in time\n"
    assert ended.returncode == -9
    assert "worker 1 at b:1" in ended.stderr
