"""What listens for workers of this machine alone is reached from it alone."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from cifar10.distributed import loopback, workers as workers_module
from cifar10.distributed.cluster import Cluster, Worker

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
        assert loopback.confine(port_of(everywhere))
        assert device_of(everywhere) == b"lo\0"
        assert device_of(other) == b""
    assert not loopback.confine(other_port), "it is closed"
    with socket.create_connection(("127.0.0.1", port_of(everywhere))) as caller:
        called, _ = everywhere.accept()
        with called:
            assert loopback.confine(port_of(everywhere))
            caller.sendall(b"still connected")
            assert called.recv(100) == b"still connected"


PROC = pytest.mark.skipif(not Path("/proc/1").exists(), reason="needs /proc")
ASK = "from cifar10.distributed import loopback; print(loopback.has_other_users())"
SOMEBODY = 54_321


def answer(*before):
    """Asks in a process of its own, in which the words before it may change much."""
    command = [*before, sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and before:  # As in a container.
        pytest.skip(f"{before[0]} cannot do this here: {done.stderr}")
    return done.stdout.strip()


@PROC
def test_other_users_are_seen_but_from_a_separate_network():
    try:
        other = subprocess.Popen(["/bin/sleep", "60"], user=SOMEBODY)
    except PermissionError:
        pytest.skip("only root starts processes of other users")
    with other:
        assert answer() == "True"
        assert answer("unshare", "--map-root-user", "--net") == "False"
        other.kill()
    # Where users are hidden, some may be there.
    hidden = ["unshare", "--pid", "--fork", "--mount-proc"]
    assert answer(*hidden) == "True"
    assert answer(*hidden, "--net") == "False"


def test_port_that_stays_open_to_the_network_is_told(monkeypatch, capsys):
    """Only where all workers are on this machine; others have to be reached."""
    ports, made = [], mock.Mock()
    for module, name, stub in (
        (workers_module.barrier, "wait_for_all", lambda *_: None),
        (workers_module.barrier, "guarded", lambda _: contextlib.nullcontext()),
        (workers_module.context, "context", mock.Mock()),
        (workers_module.tf.distribute, "MultiWorkerMirroredStrategy", made),
        (workers_module.loopback, "confine", ports.append),
    ):
        monkeypatch.setattr(module, name, stub)
    for host, gpus, told in (("a", 2, []), ("127.0.0.1", 0, [2])):
        workers = tuple(Worker("worker", n, f"{host}:{n + 1}") for n in range(2))
        workers_module.connect_cluster(Cluster(workers, 1), gpus=gpus, timeout=1.0)
        options = made.call_args.kwargs["communication_options"]
        assert options.implementation.name == ("NCCL" if gpus else "RING")
        assert ports == told
        assert ("port 2" in capsys.readouterr().err) is bool(told)
