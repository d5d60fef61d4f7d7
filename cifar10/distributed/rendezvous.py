"""Connects the workers of a training, and detects when one is lost."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar10.distributed import barrier, loopback
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import (
    LostWorkerError,
    UnavailableError,
    UsageError,
    reason,
    say,
)

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
# What TensorFlow writes into errors that another worker has caused.
_FROM_ANOTHER_WORKER = re.compile(r"ollective|oordination|eartbeat|arrier")
_REFUSAL, _CODE = "refusal", "exit_code"
_NO_PROXY = "no_grpc_proxy"
_Result = TypeVar("_Result")


def connect(
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
    with barrier.guarded(cluster), reporting_lost_workers(cluster):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(spec),
                task_type=cluster.this_worker.job,
                task_id=cluster.this_worker.task,
                rpc_layer="grpc",
                num_accelerators={"GPU": gpus} if gpus else {},
            ),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                # By itself it would choose NCCL on a hint that nothing gives (2.21).
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

    gRPC would connect them through the proxy, which knows the way to the web alone. Of
    these two variables it reads the first that is there.
    """
    direct = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    hosts = [worker.host_and_port[0] for worker in cluster.workers]
    os.environ[_NO_PROXY] = ",".join(filter(None, [direct, *hosts]))


def after_chief(
    cluster: Cluster, action: Callable[[], _Result], timeout: float
) -> _Result | None:
    """Runs an action on the chief while the other workers wait for its end.

    Returns its result; None on the other workers. All raise its `UsageError`.
    """
    if not cluster.is_chief:
        _receive("chief", cluster.workers[0], timeout)
        return None
    with sharing_refusals(cluster, "chief"):
        result = action()
    _set("chief", json.dumps({}))
    return result


def compare(cluster: Cluster, settings: Mapping[str, Any], timeout: float) -> None:
    """Checks, on every worker, that all were started with the same settings."""
    _set(f"settings/{cluster.index}", json.dumps(settings, default=str))
    settings_of = [
        _receive(f"settings/{index}", worker, timeout)
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
            + "\nStart all with the same flags, and with the same data and versions."
        )


@contextlib.contextmanager
def sharing_refusals(cluster: Cluster | None, key: str = "") -> Iterator[None]:
    """Passes a `UsageError` on to the workers that wait for this one's settings."""
    try:
        yield
    except UsageError as error:
        if cluster:
            refusal = {_REFUSAL: str(error), _CODE: error.exit_code}
            _set(key or f"settings/{cluster.index}", json.dumps(refusal))
        raise


@contextlib.contextmanager
def reporting_lost_workers(cluster: Cluster) -> Iterator[None]:
    """Turns TensorFlow's errors about a lost worker into a `LostWorkerError`."""
    try:
        yield
    except _LOST as error:
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


def ask_who_hangs(cluster: Cluster, step: int, waits: str) -> str:
    """Tells the others what the step after `step` waits for, empty for devices.

    Returns which of the others it waits for: those that report something other than
    their devices, or nothing in time; empty if there are none.
    """
    service = context.context()
    with contextlib.suppress(tf.errors.OpError):  # There is none, of an earlier hang.
        service.delete_config_key_value(f"cifar10/hang/{cluster.index}")
    _set(f"hang/{cluster.index}", json.dumps([step, waits]))
    silent = dict(enumerate(cluster.workers))
    del silent[cluster.index]
    found = []
    deadline = time.monotonic() + SECONDS_TO_TELL
    while silent and time.monotonic() < deadline:
        for index, worker in [*silent.items()]:
            with contextlib.suppress(tf.errors.OpError):
                key = f"cifar10/hang/{index}"
                their_step, cause = json.loads(service.get_config_key_value(key, 100))
                if abs(their_step - step) < 5:  # Devices may be some steps behind.
                    del silent[index]
                    found += [f"{worker}, which waits for {cause}"] if cause else []
        time.sleep(0.2)
    found += [f"{worker}, which is silent" for worker in silent.values()]
    return " and ".join(found)


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
