"""Connects the worker processes, compares their settings, and detects lost workers."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar10.distributed import ports
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.rendezvous import Rendezvous
from cifar10.errors import LostWorkerError, UsageError, reason, say
from cifar10.process.signals import StopSignals
from cifar10.towers.devices import Placement

# Once all workers have arrived, connecting them takes a second or two.
_SECONDS_TO_CONNECT = 60
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
# Occurs in TensorFlow's errors if another worker has caused them.
_FROM_ANOTHER_WORKER = re.compile(r"ollective|oordination|eartbeat|arrier")
_NO_PROXY = "no_grpc_proxy"

# A shell command that kills its parent unless its standard input is closed in time.
_GUARD = 'timeout "$0" cat; test $? != 124 || { echo "$1" >&2; kill -9 $PPID; }'


class Workers:
    """The worker processes of a training run.

    The first worker is the chief, which prints messages and writes files. Without a
    cluster, this process is the only worker.

    Attributes:
        timeout: Seconds to wait for other workers at the start (--worker_timeout).
    """

    def __init__(self, cluster: Cluster | None = None, timeout: float = 0.0) -> None:
        self._cluster = cluster or Cluster.at([""], 0)
        self._rendezvous: Rendezvous | None = None
        self.timeout = timeout

    @property
    def count(self) -> int:
        """The number of processes that train together."""
        return len(self._cluster.workers)

    @property
    def index(self) -> int:
        """The index of this process, from 0."""
        return self._cluster.index

    @property
    def is_chief(self) -> bool:
        """Whether this process prints messages and writes files."""
        return self.index == 0

    @property
    def count_on_this_machine(self) -> int:
        """The number of workers on this machine, which share its memory."""
        return self._cluster.workers_of_this_machine

    def connect(
        self, variable_update: str, placement: Placement, stop: StopSignals
    ) -> tuple[tf.distribute.Strategy | None, int]:
        """Connects the workers, and decides which towers share variables.

        Call it before TensorFlow's first operation. If `variable_update` is `towers`,
        the towers of a machine share one set of variables. If it is `mirrored`, each
        tower has a set. `auto` means `mirrored` on the GPUs of several workers, else
        `towers`. A signal ends the wait for the other workers.

        Returns the strategy, and the number of sets of variables in this process. The
        strategy is None for a single process with a single set.
        """
        # NCCL does not take two towers on one GPU.
        gpus = placement.on_gpus and not placement.simulated
        mirrored = variable_update == "mirrored" or (
            variable_update == "auto" and self.count > 1 and gpus
        )
        towers = len(placement.devices)
        if self.count == 1:
            if not mirrored:
                return None, 1
            return tf.distribute.MirroredStrategy(
                placement.devices,
                # On GPUs TensorFlow chooses NCCL. Elsewhere it would choose
                # collectives, whose keys two runs in one process would share.
                None if gpus else tf.distribute.ReductionToOneDevice(),
            ), towers
        if mirrored and not gpus and towers > 1:
            raise UsageError(
                "--variable_update mirrored: on several machines, each device can hold "
                f"only one tower,\nbut here {towers} towers share a device. Give "
                "--num_gpus 1, or leave out --variable_update."
            )
        replicas = towers if mirrored and gpus else 0
        with stop.at_once():
            self.meet()
            with guarded(self._cluster, _SECONDS_TO_CONNECT), self.reporting_losses():
                strategy = connect_cluster(self._cluster, gpus=replicas)
        stop.reinstall()
        stop.defer()  # Ending at once would look like a loss to the other workers.
        return strategy, replicas or 1

    def meet(self) -> None:
        """Waits until all workers have arrived."""
        self._rendezvous = Rendezvous(self._cluster, self.timeout)
        self._cluster = self._rendezvous.cluster

    def begin(
        self, settings: Mapping[str, Any], on_chief: Callable[[], list[str]]
    ) -> list[str]:
        """Begins a run: calls `on_chief` on the chief if all workers' settings agree.

        The chief returns the messages of `on_chief`. The others wait, then return a
        message that names the chief. A `UsageError` on one worker is raised on all.
        """
        if not self._rendezvous:
            return on_chief()
        workers = self._cluster.workers
        settings_of = self._rendezvous.gather("settings", settings)
        differences = [
            f"    {name}: {value} on {workers[0]}, {values.get(name)} on {worker}"
            for worker, values in zip(workers, settings_of, strict=True)
            for name, value in settings_of[0].items()
            if value != values.get(name)
        ]
        if differences:
            raise UsageError(
                "The workers were started differently:\n"
                + "\n".join(differences)
                + "\nStart all workers with the same flags, data and versions."
            )
        messages = [f"This is {workers[self.index]}. See the output of {workers[0]}."]
        if self.is_chief:
            with self.sharing_refusals():
                messages = on_chief()
        self._rendezvous.gather("begun", True)
        return messages

    @contextlib.contextmanager
    def sharing_refusals(self) -> Iterator[None]:
        """Sends any `UsageError` raised in the block to the other workers.

        Their `begin` then raises the same error.
        """
        try:
            yield
        except UsageError as error:
            if self._rendezvous:
                self._rendezvous.refuse(error)
            raise

    @contextlib.contextmanager
    def reporting_losses(self) -> Iterator[None]:
        """Turns TensorFlow's errors about a lost worker into a `LostWorkerError`."""
        try:
            yield
        except _LOST as error:
            cluster, said = self._cluster, str(error)
            found = re.findall(r"/job:worker/(?:replica:\d+/)?task:(\d+)", said)
            lost = [one for one in cluster.other_workers if str(one.index) in found]
            is_others = lost or _FROM_ANOTHER_WORKER.search(said)
            if self.count == 1 or not is_others:
                raise  # A fault of this process, such as a GPU's.
            names = " or ".join(map(str, lost or cluster.other_workers))
            cause = re.search(r"aborted by: (.*?):?$", said, re.MULTILINE)
            raise LostWorkerError(
                f"{cluster.this_worker} has lost {names} "
                f"({cause[1] if cause else reason(error)}).\nThe output of the lost "
                "worker may say why. Start all workers again to resume from the last "
                "checkpoint, if there is one."
            ) from error

    def limit_silence(self) -> None:
        """Makes a step fail within 30 seconds if it waits for an unreachable worker.

        TensorFlow's heartbeats go only to the chief, so they do not detect a broken
        link between two other workers.
        """
        if self.count > 1:
            ports.limit_silence_of(self._cluster)


def connect_cluster(
    cluster: Cluster, *, gpus: int
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Connects this worker's TensorFlow runtime to those of the other workers.

    Call it after the rendezvous and before TensorFlow's first operation. Each of the
    worker's `gpus` GPUs gets one replica. With 0 GPUs, the CPU gets one replica.
    """
    # Without this, gRPC would connect workers through the proxy of `https_proxy`, which
    # cannot reach them. gRPC reads the first of these two variables that is set.
    direct = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    hosts = [worker.host_and_port[0] for worker in cluster.workers]
    os.environ[_NO_PROXY] = ",".join(filter(None, [direct, *hosts]))
    # A worker whose process ends is detected at once, by its closed connections. A lost
    # machine is detected after this time; the strategy's default is too short.
    silence = 1000 * ports.SECONDS_OF_SILENCE
    job = coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=len(cluster.workers)
    )
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=silence,
        shutdown_barrier_timeout_in_ms=silence,
        coordinated_jobs=[job],
    )
    addresses = [worker.address for worker in cluster.workers]
    communication = tf.distribute.experimental.CommunicationImplementation
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}),
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
    _, port = cluster.this_worker.host_and_port
    if cluster.is_on_loopback and not ports.confine(port):
        say(
            f"WARNING: {cluster.this_worker}: other machines can reach port {port} and "
            "run any\nTensorFlow command there. Close the port with a firewall."
        )
    return strategy


@contextlib.contextmanager
def guarded(cluster: Cluster, seconds: float) -> Iterator[None]:
    """Kills this process, with a message, if the block takes longer than `seconds`.

    A firewall between two workers can make TensorFlow wait in vain for a connection.
    This wait blocks Python, so a separate process keeps the time.
    """
    message = (
        f"{cluster.this_worker} was not connected to "
        f"{', '.join(map(str, cluster.other_workers))} within {seconds} s "
        "although all had arrived.\nCheck that every worker can reach the addresses of "
        "all other workers."
    )
    command = ["sh", "-c", _GUARD, str(seconds), message]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603
    try:
        yield
    finally:
        guard.communicate()
