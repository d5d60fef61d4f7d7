"""What listens for workers of this machine alone is reached from it alone."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cifar10.distributed import loopback, rendezvous
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


# Connects, says so, and says how the connection ends.
CALL = """
import socket, sys
try:
    connection = socket.create_connection(("10.79.0.1", int(sys.argv[1])), 10)
except OSError:
    sys.exit("refused")
print("connected", flush=True)
sys.exit("cut" if connection.recv(1) == b"" else "answered")
"""

NAME = f"cifar10-lo-{os.getpid()}"


@pytest.fixture
def network():
    """Another machine, which reaches this one at 10.79.0.1; returns how it calls."""

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S607

    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as error:  # As in a container.
        pytest.skip(f"no network namespaces: {error.stderr.decode()}")
    try:
        cable = ["link", "add", "c10lo", "type", "veth", "peer", "name", "c10lo"]
        ip(*cable, "netns", NAME)
        ip("addr", "add", "10.79.0.1/24", "dev", "c10lo")
        ip("-n", NAME, "addr", "add", "10.79.0.2/24", "dev", "c10lo")
        for where in ([], ["-n", NAME]):
            ip(*where, "link", "set", "c10lo", "up")
        yield ["ip", "netns", "exec", NAME, sys.executable, "-c", CALL]
    finally:
        ip("netns", "del", NAME)


@LINUX
@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("ip"),
    reason="network namespaces need root and the program ip",
)
def test_other_machine_is_cut_and_then_refused(everywhere, network):
    call = [*network, str(port_of(everywhere))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, **pipes) as early:
        assert early.stdout.readline() == "connected\n"
        called, _ = everywhere.accept()
        with called:
            assert loopback.confine(port_of(everywhere))
            assert early.communicate(timeout=60)[1] == "cut\n"
    late = subprocess.run(call, capture_output=True, text=True, check=False)
    assert late.stderr == "refused\n"


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


@PROC
def test_users_that_are_hidden_may_be_there():
    """Only in a network that they can reach."""
    hidden = ["unshare", "--pid", "--fork", "--mount-proc"]
    assert answer(*hidden) == "True"
    assert answer(*hidden, "--net") == "False"


@pytest.fixture
def connect(monkeypatch):
    """Connects a worker without waiting for others; returns what TensorFlow is told."""
    asked = []
    for module, name, stub in (
        (rendezvous.barrier, "wait_for_all", lambda *_: None),
        (rendezvous.barrier, "guarded", lambda _: contextlib.nullcontext()),
        (
            rendezvous.context.Context,
            "configure_coordination_service",
            lambda *_, **__: 0,
        ),
        (
            rendezvous.tf.distribute,
            "MultiWorkerMirroredStrategy",
            lambda **flags: asked.append(flags) or "strategy",
        ),
    ):
        monkeypatch.setattr(module, name, stub)

    def connect(host, gpus=0):
        workers = tuple(Worker("worker", n, f"{host}:{n + 1}") for n in range(2))
        cluster = Cluster(workers, 1)
        assert rendezvous.connect(cluster, gpus=gpus, timeout=1.0) == "strategy"
        return asked[-1]

    return connect


@pytest.mark.parametrize(
    ("host", "confines", "warns"),
    [("127.0.0.1", True, False), ("127.0.0.1", False, True), ("a", False, False)],
)
def test_port_that_stays_open_to_the_network_is_told(
    connect, monkeypatch, capsys, host, confines, warns
):
    """Only where all workers are on this machine; others have to be reached."""
    ports = []
    monkeypatch.setattr(
        rendezvous.loopback, "confine", lambda port: ports.append(port) or confines
    )
    connect(host)
    assert ports == ([] if host == "a" else [2])
    assert ("port 2" in capsys.readouterr().err) is warns


@pytest.mark.parametrize(("gpus", "chosen"), [(0, "RING"), (2, "NCCL")])
def test_gpus_of_several_machines_reduce_over_nccl(connect, gpus, chosen):
    options = connect("a", gpus)["communication_options"]
    assert options.implementation.name == chosen
