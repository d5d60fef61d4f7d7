"""The processes that train together: how they connect, agree, and notice a loss."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar10.distributed import barrier, loopback
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.distributed.probe import Probe
from cifar10.errors import (
    LostWorkerError,
    UnavailableError,
    UsageError,
    reason,
    say,
)
from cifar10.process.signals import StopSignals
from cifar10.towers.devices import Placement

# A worker whose process ends is detected at once, by its closed connections. One whose
# machine or network is gone is detected after this time; shorter interruptions pass.
HEARTBEAT_SECONDS = 25
# Workers notice a hanging step at almost the same time; a silent one is stuck.
SECONDS_TO_TELL = 5.0
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
# Words of TensorFlow's errors that another worker has caused.
_FROM_ANOTHER_WORKER = re.compile(r"ollective|oordination|eartbeat|arrier")
_REFUSAL, _CODE = "refusal", "exit_code"
_NO_PROXY = "no_grpc_proxy"


class Workers:
    """The processes of a training, of which the first, the chief, prints and writes.

    Without a cluster this process is the only one. `replicas.ReplicaBuilder` runs the
    step, and exchanges the numbers that travel with it.

    Attributes:
        timeout: Seconds to wait for the others at the start (--worker_timeout).
    """

    def __init__(self, cluster: Cluster | None = None, timeout: float = 0.0) -> None:
        self._cluster = cluster
        self.timeout = timeout
        self._probe: Probe | None = None

    @property
    def count(self) -> int:
        """The number of processes that train together."""
        return len(self._cluster.workers) if self._cluster else 1

    @property
    def index(self) -> int:
        """The number of this process among all, from 0."""
        return self._cluster.index if self._cluster else 0

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    @property
    def count_on_this_machine(self) -> int:
        """The number of the processes that share this machine's memory."""
        return self._cluster.workers_of_this_machine if self._cluster else 1

    def connect(
        self, variable_update: str, placement: Placement, stop: StopSignals
    ) -> tuple[tf.distribute.Strategy | None, int]:
        """Connects the workers, and chooses which towers share variables.

        It has to run before TensorFlow's first operation. With `towers` all towers of a
        machine share its variables; with `mirrored` each tower has its own; with `auto`
        each GPU has its own if there are several machines. A signal ends the wait for
        the others.

        Returns the strategy, None for one set of variables in one process, and how many
        sets of variables this process has.
        """
        # NCCL does not take two towers on one GPU.
        gpus = placement.on_gpus and not placement.simulated
        mirrored = variable_update == "mirrored" or (
            variable_update == "auto" and self._cluster is not None and gpus
        )
        towers = len(placement.devices)
        if self._cluster is None:
            if not mirrored:
                return None, 1
            return tf.distribute.MirroredStrategy(
                placement.devices,
                # On GPUs TensorFlow chooses NCCL. Elsewhere it would choose
                # collectives, whose numbers two trainings in one process would share.
                None if gpus else tf.distribute.ReductionToOneDevice(),
            ), towers
        if mirrored and not gpus and towers > 1:
            raise UsageError(
                "--variable_update mirrored: on several machines TensorFlow mirrors "
                "variables on whole GPUs or on one device of a CPU,\nand here "
                f"{towers} towers share one. Leave it out, or give --num_gpus 1."
            )
        replicas = towers if mirrored and gpus else 0
        with stop.at_once():
            strategy = connect_cluster(
                self._cluster, gpus=replicas, timeout=self.timeout
            )
        stop.reinstall()
        stop.defer()  # The others would take it for a loss: all stop after one step.
        return strategy, replicas or 1

    def begin(
        self, settings: Mapping[str, Any], on_chief: Callable[[], list[str]]
    ) -> list[str]:
        """Begins a run on the chief, once all workers have the same settings.

        The others wait for it. Returns the chief's messages, or where to read them; all
        raise the `UsageError` of any.
        """
        if not self._cluster:
            return on_chief()
        self._compare_settings(self._cluster, settings)
        this, chief = self._cluster.this_worker, self._cluster.workers[0]
        if not self.is_chief:
            _receive("chief", chief, self.timeout)
            return [f"{this}; {chief} prints and writes."]
        with self.sharing_refusals("chief"):
            messages = on_chief()
        _set("chief", json.dumps({}))
        return messages

    def _compare_settings(self, cluster: Cluster, settings: Mapping[str, Any]) -> None:
        """Checks, on every worker, that all were started with the same settings."""
        _set(f"settings/{self.index}", json.dumps(settings, default=str))
        settings_of = [
            _receive(f"settings/{index}", worker, self.timeout)
            for index, worker in enumerate(cluster.workers)
        ]
        chief, first = cluster.workers[0], settings_of[0]
        differences = [
            f"    {name}: {value} on {chief}, {values.get(name)} on {worker}"
            for worker, values in zip(cluster.workers, settings_of, strict=True)
            for name, value in first.items()
            if value != values.get(name)
        ]
        if differences:
            raise UsageError(
                "The workers were started differently:\n"
                + "\n".join(differences)
                + "\nStart all with the same flags, data and versions."
            )

    @contextlib.contextmanager
    def sharing_refusals(self, key: str = "") -> Iterator[None]:
        """Passes a `UsageError` on to the workers that wait for `key`.

        By default they wait for this worker's settings.
        """
        try:
            yield
        except UsageError as error:
            if self._cluster:
                refusal = {_REFUSAL: str(error), _CODE: error.exit_code}
                _set(key or f"settings/{self.index}", json.dumps(refusal))
            raise

    @contextlib.contextmanager
    def reporting_losses(self) -> Iterator[None]:
        """Turns TensorFlow's errors about a lost worker into a `LostWorkerError`."""
        try:
            yield
        except _LOST as error:
            if not (cluster := self._cluster):
                raise
            lost = cluster.mentioned_in(str(error))
            if not lost and not _FROM_ANOTHER_WORKER.search(str(error)):
                raise  # A fault of this process, such as a GPU's.
            names = " or ".join(map(str, lost or cluster.other_workers))
            cause = re.search(r"aborted by: (.*?):?$", str(error), re.MULTILINE)
            raise LostWorkerError(
                f"{cluster.this_worker} has lost {names} "
                f"({cause[1] if cause else reason(error)}); its own output says why.\n"
                "Start all workers again to resume from the last checkpoint."
            ) from error

    def ask_who_hangs(self, step: int, waits: str) -> str:
        """Tells the others what the step after `step` waits for, empty for devices.

        Returns the workers that it waits for: those that report a cause other than
        their devices, and those that do not answer in time; empty if there are none.
        """
        if not self._cluster:
            return ""
        service = context.context()
        with contextlib.suppress(tf.errors.OpError):  # No earlier step hung.
            service.delete_config_key_value(f"cifar10/hang/{self.index}")
        _set(f"hang/{self.index}", json.dumps([step, waits]))
        silent = dict(enumerate(self._cluster.workers))
        del silent[self.index]
        found = []
        deadline = time.monotonic() + SECONDS_TO_TELL
        while silent and time.monotonic() < deadline:
            for index, worker in [*silent.items()]:
                with contextlib.suppress(tf.errors.OpError):
                    key = f"cifar10/hang/{index}"
                    answer = json.loads(service.get_config_key_value(key, 100))
                    their_step, cause = answer
                    if abs(their_step - step) < 5:  # Devices may be some steps behind.
                        del silent[index]
                        found += [f"{worker}, which waits for {cause}"] if cause else []
            time.sleep(0.2)
        found += [f"{worker}, which is silent" for worker in silent.values()]
        return " and ".join(found)

    def watch_connections(self) -> None:
        """Looks up the other workers' addresses, while all are connected."""
        self._probe = Probe(self._cluster) if self._cluster else None

    def unreachable(self) -> list[Worker]:
        """Returns the workers that this one can no longer reach."""
        return self._probe.unreachable() if self._probe else []


def connect_cluster(
    cluster: Cluster, *, gpus: int, timeout: float
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Waits for all workers and connects them, before TensorFlow's first operation.

    Each of this worker's `gpus` GPUs has a replica. With 0 GPUs there is one replica,
    whose variables are on the CPU.
    """
    barrier.wait_for_all(cluster, timeout)
    _bypass_proxies(cluster)
    spec: dict[str, list[str]] = {}
    for worker in cluster.workers:
        spec.setdefault(worker.job, []).append(worker.address)
    # The strategy would do this itself, with a timeout of an hour, which there is no
    # public way to change (TensorFlow 2.21).
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{cluster.workers[0].job}/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * timeout),
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_SECONDS,
        shutdown_barrier_timeout_in_ms=1000 * HEARTBEAT_SECONDS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
            for job, addresses in spec.items()
        ],
    )
    communication = tf.distribute.experimental.CommunicationImplementation
    with barrier.guarded(cluster), Workers(cluster).reporting_losses():
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(spec),
                task_type=cluster.this_worker.job,
                task_id=cluster.this_worker.task,
                rpc_layer="grpc",
                num_accelerators={"GPU": gpus} if gpus else {},
            ),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                # AUTO never chooses NCCL here (TensorFlow 2.21).
                implementation=communication.NCCL if gpus else communication.RING
            ),
        )
    _, port = cluster.this_worker.host_and_port
    if cluster.is_on_loopback and not loopback.confine(port):
        say(
            f"WARNING: {cluster.this_worker}: other machines can reach port {port}, "
            "which takes\nany command of TensorFlow's. Close it with a firewall."
        )
    return strategy


def _bypass_proxies(cluster: Cluster) -> None:
    """Connects the workers directly, also where `https_proxy` is set.

    gRPC would connect them through the proxy, which reaches only the web. It reads the
    first of these two variables that is set.
    """
    direct = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    hosts = [worker.host_and_port[0] for worker in cluster.workers]
    os.environ[_NO_PROXY] = ",".join(filter(None, [direct, *hosts]))


def _receive(key: str, worker: Worker, timeout: float) -> dict[str, Any]:
    """Returns what a worker has set; raises its error if it has refused."""
    values = json.loads(_get(key, worker, timeout))
    if refusal := values.get(_REFUSAL):
        again = values.get(_CODE) == UnavailableError.exit_code
        kind = UnavailableError if again else UsageError
        raise kind(f"{worker} has refused: {refusal}")
    return values


def _set(key: str, value: str) -> None:
    context.context().set_config_key_value(f"cifar10/{key}", value)


def _get(key: str, worker: Worker, timeout: float) -> str:
    try:
        return context.context().get_config_key_value(
            f"cifar10/{key}", timeout_in_ms=int(1000 * timeout)
        )
    except tf.errors.DeadlineExceededError as error:
        raise LostWorkerError(
            f"{worker} has not answered for {timeout:g} s; its own output may say why."
            "\nIf it is only slow, wait longer with --worker_timeout."
        ) from error
