"""How TensorFlow is asked to connect the workers, and who reaches its port then."""

import errno
import os
import socket
from unittest import mock

import pytest
import tensorflow as tf

import runs
from cifar10.distributed import workers
from cifar10.distributed.cluster import Cluster
from cifar10.errors import LostWorkerError, UsageError
from cifar10.towers.devices import Placement

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


@pytest.fixture
def made(monkeypatch):
    """Stands for TensorFlow's strategy, and its context."""
    made = mock.Mock()
    monkeypatch.setattr(workers.Workers, "_has_connected", False)
    monkeypatch.setattr(workers.context, "context", mock.Mock())
    monkeypatch.setattr(workers.tf.distribute, "MultiWorkerMirroredStrategy", made)
    return made


def device_of(server):
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)


@LINUX
@pytest.mark.usefixtures("made")
def test_port_of_workers_of_one_machine_is_closed_to_others(everywhere):
    port = everywhere.getsockname()[1]
    for host, device in (("a", b""), ("127.0.0.1", b"lo\0")):
        with socket.create_server(("", 0)) as other:
            cluster = Cluster((f"{host}:1", f"{host}:{port}"), 1)
            workers.connect_cluster(cluster, gpus=0)
            assert device_of(everywhere) == device
            assert device_of(other) == b"", "it is another program's"
    with socket.create_connection(("127.0.0.1", port)) as caller:
        called, _ = everywhere.accept()
        with called:
            caller.sendall(b"connected")
            assert called.recv(100) == b"connected"


@LINUX
@pytest.mark.usefixtures("made")
def test_workers_connect_on_a_kernel_that_confines_no_socket(everywhere, monkeypatch):
    """As Linux before 5.7 for all users but root."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    port = everywhere.getsockname()[1]
    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    cluster = Cluster(("127.0.0.1:1", f"127.0.0.1:{port}"), 1)
    assert workers.connect_cluster(cluster, gpus=0)
    assert device_of(everywhere) == b""


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("part", ["rendezvous.meet", "connect_cluster"])
def test_a_worker_lost_while_all_connect_is_named(monkeypatch, part):
    def lose(*_, **__):
        message = "Collective ops is aborted by: Socket"
        raise tf.errors.UnavailableError(None, None, message)

    monkeypatch.setattr(workers.rendezvous, "meet", mock.Mock())
    monkeypatch.setattr(f"{workers.__name__}.{part}", lose)
    placement = Placement(("/cpu:0",), simulated=False, description="")
    found = workers.Workers(Cluster(("a:1", "b:1"), 0))
    with pytest.raises(LostWorkerError, match="worker 1 at b:1"):
        found.connect("auto", placement, mock.Mock())


def test_gpus_are_mirrored_although_tensorflow_has_started(monkeypatch):
    """As in a notebook, where its threads can no longer be chosen."""
    tf.config.list_logical_devices()
    monkeypatch.setattr(workers.gpu_links, "refuse_faulty", mock.Mock())
    gpus = ("/gpu:0", "/gpu:1")
    placement = Placement(gpus, simulated=False, description="")
    found = workers.Workers().connect("mirrored", placement, mock.Mock())
    assert found == (None, 2)


@pytest.mark.parametrize(
    ("update", "devices", "sets"),
    [
        ("auto", ("/gpu:0", "/gpu:1"), 2),
        ("mirrored", ("/gpu:0", "/gpu:1"), 2),
        ("towers", ("/gpu:0", "/gpu:1"), 1),
        ("auto", ("/cpu:0", "/cpu:0"), 1),
        ("mirrored", ("/cpu:0",), 1),
        ("mirrored", ("/cpu:0", "/cpu:0"), None),
    ],
)
def test_each_gpu_of_several_machines_has_variables_but_towers_of_a_cpu_share_them(
    made, monkeypatch, update, devices, sets
):
    monkeypatch.setattr(workers.rendezvous, "meet", mock.Mock())
    placement = Placement(devices, simulated=False, description="")
    found = workers.Workers(Cluster(("a:1", "b:1"), 0))
    if sets is None:
        with pytest.raises(UsageError, match="--num_gpus 1"):
            found.connect(update, placement, mock.Mock())
        return
    assert found.connect(update, placement, mock.Mock())[1] == sets
    made.assert_called_once()


def test_a_process_trains_with_other_workers_only_once(made, monkeypatch):
    """TensorFlow's server keeps the port; a failed meeting has started none."""
    meet = mock.Mock(side_effect=[LostWorkerError("b is missing"), None])
    monkeypatch.setattr(workers.rendezvous, "meet", meet)
    placement = Placement(("/cpu:0",), simulated=False, description="")

    def connect(*addresses):
        found = workers.Workers(Cluster(addresses, 0) if addresses else None)
        return found.connect("auto", placement, mock.Mock())

    with pytest.raises(LostWorkerError, match="missing"):
        connect("a:1", "b:1")
    connect("a:1", "b:1")
    with pytest.raises(UsageError, match=r"only once.*new process"):
        connect("a:2", "b:2")
    assert meet.call_count == 2
    made.assert_called_once()
    assert connect() == (None, 1)


def test_gpus_are_connected_by_nccl(made):
    for gpus, name in ((2, "NCCL"), (0, "RING")):
        workers.connect_cluster(Cluster(("a:1", "b:1"), 1), gpus=gpus)
        options = made.call_args.kwargs["communication_options"]
        assert options.implementation.name == name


@pytest.mark.usefixtures("made")
def test_no_proxy_stands_between_workers(monkeypatch):
    monkeypatch.delenv(workers._NO_PROXY, raising=False)
    monkeypatch.setenv("no_proxy", "intranet")
    workers.connect_cluster(Cluster(("a:1", "b:2"), 1), gpus=0)
    assert os.environ[workers._NO_PROXY] == "intranet,a,b"


def test_a_process_failing_to_connect_ends_and_shows_its_stack():
    """TensorFlow holds Python's lock meanwhile, so no thread could do it."""
    program = (
        "import time\n"
        "from unittest import mock\n"
        "from cifar10.distributed import workers\n"
        "from cifar10.distributed.cluster import Cluster\n"
        "workers.context = mock.Mock()\n"
        "workers._SECONDS_TO_CONNECT = 0.4\n"
        "def connect(seconds):\n"
        "    wait = mock.Mock(side_effect=lambda **_: time.sleep(seconds))\n"
        "    workers.tf.distribute.MultiWorkerMirroredStrategy = wait\n"
        "    workers.connect_cluster(Cluster(('a:1', 'b:1'), 0), gpus=0)\n"
        "connect(0)\n"
        "time.sleep(0.6)\n"
        "print('connected in time', flush=True)\n"
        "connect(30)\n"
    )
    ended = runs.run("-c", program)
    assert ended.stdout == "connected in time\n"
    assert ended.returncode == 1
    assert "in connect_cluster" in ended.stderr
