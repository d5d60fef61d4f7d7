"""Connects the worker processes, compares their settings, and detects lost workers."""

import contextlib
import faulthandler
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar10.config import run_config
from cifar10.distributed import gpu_links, rendezvous
from cifar10.distributed.cluster import Cluster
from cifar10.errors import LostWorkerError, UsageError, reason
from cifar10.process.signals import StopSignals
from cifar10.towers.devices import Placement

# Once all workers have arrived, connecting them takes a second or two.
_SECONDS_TO_CONNECT = 60
# A worker whose process ends is detected at once, by its closed connections. A lost
# machine is detected after this time; the strategy's default is too short.
_MILLISECONDS_OF_SILENCE = 25_000
_LOST = (
    *(tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError),
    *(tf.errors.DeadlineExceededError, tf.errors.FailedPreconditionError),
    *(tf.errors.UnavailableError, tf.errors.UnknownError),
)
# Occurs in TensorFlow's errors if another worker has caused them.
_FROM_ANOTHER_WORKER = re.compile(r"ollective|oordination|eartbeat|arrier")
_NO_PROXY = "no_grpc_proxy"
# What a new run takes from the run of its --initial_weights, where that is found.
_OF_WEIGHTS = {"data_division", "depth", "distortions", "image_size", "width"}


class Workers:
    """The worker processes of a training run.

    The first is the chief, which prints messages and writes files; without a cluster,
    it is alone. At the start, workers wait up to `timeout` seconds (--worker_timeout).
    """

    # TensorFlow's server keeps its port for the life of the process.
    _has_connected: ClassVar[bool] = False

    def __init__(self, cluster: Cluster | None = None, timeout: float = 0.0) -> None:
        self._cluster = cluster or Cluster(("",), 0)
        self._timeout = timeout
        self.count = len(self._cluster.addresses)  # Processes that train together.
        self.index = self._cluster.index  # This process's, from 0.
        self.is_chief = self.index == 0

    def connect(
        self, variable_update: str, placement: Placement, stop: StopSignals
    ) -> tuple[tf.distribute.Strategy | None, int]:
        """Connects the workers, and decides which towers share variables.

        Call it before TensorFlow's first operation. If `variable_update` is `towers`,
        the towers of a machine share one set of variables. If it is `mirrored`, each
        tower has a set. `auto` means `mirrored` on the GPUs of several workers, else
        `towers`. A signal ends the wait for the other workers.

        Returns a strategy, None if alone, and this process's number of variable sets.
        """
        suits_nccl = placement.suits_nccl
        if variable_update == "mirrored" and len(placement.gpu_names) > 1:
            raise UsageError(
                f"--variable_update mirrored: {' and '.join(placement.gpu_names)} "
                "would round differently. Give --variable_update towers, or choose "
                "GPUs of one kind with CUDA_VISIBLE_DEVICES."
            )
        by_default = variable_update == "auto" and self.count > 1 and suits_nccl
        mirrored = variable_update == "mirrored" or by_default
        towers = len(placement.devices)
        if self.count == 1:
            if mirrored and suits_nccl and towers > 1:
                gpu_links.refuse_faulty(placement.devices, tf.__version__)
                with contextlib.suppress(RuntimeError):  # TensorFlow has started.
                    # Each program of XLA holds a thread until all have begun.
                    least = max(os.cpu_count() or 1, 2 * towers)
                    tf.config.threading.set_inter_op_parallelism_threads(least)
            return None, towers if mirrored else 1
        if mirrored and not suits_nccl and towers > 1:
            raise UsageError(
                f"--variable_update mirrored: with several machines, {towers} towers "
                "cannot share a device. Give --num_gpus 1, or --variable_update auto."
            )
        if Workers._has_connected:
            why = "A process can train with other workers only once."
            raise UsageError(f"{why} Start a new process for each run.")
        replicas = towers if mirrored and suits_nccl else 0
        with self.reporting_losses():
            rendezvous.meet(self._cluster, self._timeout)
            Workers._has_connected = True
            strategy = connect_cluster(self._cluster, gpus=replicas)
        stop.reinstall()
        return strategy, replicas or 1

    def begin(
        self, settings: Mapping[str, Any], on_chief: Callable[[], list[str]]
    ) -> list[str]:
        """Begins a run: calls `on_chief` on the chief if all workers' settings agree.

        The chief returns the messages of `on_chief`. The others wait, then return a
        message that names the chief. If a worker's settings differ from those of the
        chief, both raise a `UsageError`, and the others lose the chief.
        """
        if self.count == 1:
            return on_chief()
        store, name = context.context(), self._cluster.name
        text = json.dumps(settings, default=str)
        if self.is_chief:
            store.set_config_key_value("settings", text)
            for index in self._cluster.others:
                if problem := self._wait_for(f"problem/{index}", index):
                    raise UsageError(problem)
            messages = on_chief()
            store.set_config_key_value("begun", "")
            return messages
        own, chiefs = json.loads(text), json.loads(self._wait_for("settings", 0))
        differing = {name for name in chiefs if _differ(name, own, chiefs)}
        if lines := [
            f"    {key}: {chiefs[key]} on {name(0)}, {own.get(key)} on {name()}"
            for key in sorted(differing)
        ]:
            fix = "Start all workers with the same flags, data, code and versions."
            lines = ["The workers were started differently:", *lines, fix]
        if chiefs.get("initial_weights") and differing & _OF_WEIGHTS:
            what = "If no flag sets these, --initial_weights"
            lines.append(f"{what} must name the same run or file everywhere.")
        if differing and differing <= {"xla", "xla_update"}:
            lines.append("For xla alone, give --xla or --no-xla to all workers.")
        problem = "\n".join(lines)
        store.set_config_key_value(f"problem/{self.index}", problem)
        if problem:
            raise UsageError(problem)
        self._wait_for("begun", 0)
        return [f"This is {name()}. See the output of {name(0)}."]

    def _wait_for(self, key: str, index: int) -> str:
        """Returns the value that another worker sets for a key."""
        milliseconds = round(1000 * self._timeout)
        try:
            return context.context().get_config_key_value(key, milliseconds)
        except _LOST as error:
            raise LostWorkerError(
                f"{self._cluster.name()} got no reply from {self._cluster.name(index)} "
                f"({reason(error)}). The output of that worker may say why."
            ) from error

    @contextlib.contextmanager
    def reporting_losses(self) -> Iterator[None]:
        """Turns TensorFlow's errors about a lost worker into a `LostWorkerError`."""
        try:
            yield
        except _LOST as error:
            cluster, said = self._cluster, str(error)
            found = re.findall(r"/job:worker/(?:replica:\d+/)?task:(\d+)", said)
            lost = [index for index in cluster.others if str(index) in found]
            if self.count == 1 or not (lost or _FROM_ANOTHER_WORKER.search(said)):
                raise  # A fault of this process, such as a GPU's.
            cause = re.search(r"aborted by: (.*?):?$", said, re.MULTILINE)
            raise LostWorkerError(
                f"{cluster.name()} has lost {cluster.name(*(lost or cluster.others))} "
                f"({cause[1] if cause else reason(error)}). Its output may say why. "
                "Start all workers again to resume from the last checkpoint."
            ) from error


def mirrored_strategy(devices: list[str], *, by_nccl: bool) -> tf.distribute.Strategy:
    """Returns a strategy whose collectives share no keys with an earlier one's."""
    # Otherwise the second run of a process would fail with "Shape mismatch in the
    # collective instance". TensorFlow's strategy_combinations.py skips as many keys.
    tf.distribute.MirroredStrategy._collective_key_base += 100_000  # noqa: SLF001
    # By default TensorFlow chooses NCCL on GPUs.
    reduction = None if by_nccl else tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, reduction)


def connect_cluster(cluster: Cluster, *, gpus: int) -> tf.distribute.Strategy:
    """Connects this worker's TensorFlow runtime to those of the other workers.

    Call it before TensorFlow's first operation. Each of the worker's `gpus` GPUs gets
    one replica. With 0 GPUs, the CPU gets one replica.
    """
    # Without this, gRPC would connect workers through the proxy of `https_proxy`, which
    # cannot reach them. gRPC reads the first of these two variables that is set.
    direct = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    count = len(cluster.addresses)
    hosts = [cluster.host_and_port(index)[0] for index in range(count)]
    os.environ[_NO_PROXY] = ",".join(filter(None, [direct, *hosts]))
    job = coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=count)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=_MILLISECONDS_OF_SILENCE,
        shutdown_barrier_timeout_in_ms=_MILLISECONDS_OF_SILENCE,
        coordinated_jobs=[job],
    )
    communication = tf.distribute.experimental.CommunicationImplementation
    # A firewall between two workers makes TensorFlow wait forever, in a call that
    # blocks Python. The timeout ends the process, and shows where it waits.
    faulthandler.dump_traceback_later(_SECONDS_TO_CONNECT, exit=True)
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": [*cluster.addresses]}),
                task_type="worker",
                task_id=cluster.index,
                rpc_layer="grpc",
                num_accelerators={"GPU": gpus} if gpus else {},
            ),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                # AUTO never chooses NCCL here (TensorFlow 2.21).
                implementation=communication.NCCL if gpus else communication.RING
            ),
        )
    finally:
        faulthandler.cancel_dump_traceback_later()
    if cluster.is_on_loopback:
        _confine(cluster.host_and_port(cluster.index)[1])
    return strategy


def _confine(port: int) -> None:
    """Binds TensorFlow's server, which listens on all addresses, to loopback."""
    for opened in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # The descriptor may be closed by now.
            if not opened.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(opened.name))) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and one.getsockname()[1:2] == (port,):  # Linux 5.7 or later.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def _differ(name: str, own: dict[str, Any], chiefs: dict[str, Any]) -> bool:
    """Returns whether a setting differs, or what a worker's code computes."""
    if name.startswith(run_config.COMPUTED):  # A worker may lack a metric.
        return run_config.differ(chiefs[name], own.get(name, []), chiefs["precision"])
    return chiefs[name] != own.get(name)
