"""Brings the workers of a training together, and notices when one is lost."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar10.distributed import barrier
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError, reason

# A worker whose process ends is noticed at once, by its closed connections. One whose
# machine or network is gone is missed after this time; shorter interruptions pass.
HEARTBEAT_SECONDS = 25
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
# What TensorFlow writes into the errors that others are to blame for.
_ABOUT_OTHERS = re.compile(r"ollective|oordination|eartbeat|arrier")
_REFUSAL = "refusal"
_Result = TypeVar("_Result")


def connect(
    cluster: Cluster, *, gpus: int, timeout: float
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Waits for all workers and connects them; before TensorFlow's first operation.

    Args:
        cluster: The workers.
        gpus: Replicas of this worker, one on each of so many GPUs; 0 for one replica
            whose variables are on the CPU.
        timeout: Seconds to wait for the others.

    Returns:
        The strategy of their replicas.

    Raises:
        UsageError: This worker's port is taken, or the workers disagree about who they
            are.
        LostWorkerError: Some have not come.
    """
    barrier.wait_for_all(cluster, timeout)
    spec: dict[str, list[str]] = {}
    for worker in cluster.workers:
        spec.setdefault(worker.job, []).append(worker.address)
    # The strategy would do this itself, with a patience of an hour. There is no public
    # way to say how long (TensorFlow 2.21).
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
    with barrier.guarded(cluster), noticing_losses(cluster):
        return tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(spec),
                task_type=cluster.own.job,
                task_id=cluster.own.task,
                rpc_layer="grpc",
                num_accelerators={"GPU": gpus} if gpus else {},
            ),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=communication.AUTO if gpus else communication.RING
            ),
        )


def after_chief(
    cluster: Cluster, action: Callable[[], _Result], timeout: float
) -> _Result | None:
    """Lets the chief do something while the others wait for its end.

    Args:
        cluster: The workers.
        action: What the chief does.
        timeout: Seconds that the others wait.

    Returns:
        What the action returns; None for those who waited.

    Raises:
        UsageError: The chief has refused; the others say so too.
    """
    if not cluster.is_chief:
        chief = cluster.workers[0]
        if refusal := _get("chief", chief, timeout):
            raise UsageError(f"{chief} has refused: {refusal}")
        return None
    try:
        result = action()
    except UsageError as error:
        _set("chief", str(error))
        raise
    _set("chief", "")
    return result


def compare(cluster: Cluster, settings: Mapping[str, Any], timeout: float) -> None:
    """Refuses workers that were not started alike.

    Args:
        cluster: The workers.
        settings: What has to be the same for all.
        timeout: Seconds to wait for theirs.

    Raises:
        UsageError: They differ; every worker says in what.
    """
    own = cluster.index
    _set(f"settings/{own}", json.dumps(settings, default=str))
    told = [
        json.loads(_get(f"settings/{index}", worker, timeout))
        for index, worker in enumerate(cluster.workers)
    ]
    for worker, values in zip(cluster.workers, told, strict=True):
        if refusal := values.get(_REFUSAL):
            raise UsageError(f"{worker} has refused: {refusal}")
    first, *others = told
    differences = [
        f"    {name}: {first.get(name)} on {cluster.workers[0]}, "
        f"{other.get(name)} on {worker}"
        for worker, other in zip(cluster.workers[1:], others, strict=True)
        for name in first
        if first[name] != other.get(name)
    ]
    if differences:
        raise UsageError(
            "The workers were started differently:\n"
            + "\n".join(differences)
            + "\nStart all with the same flags, and with the same data and versions."
        )


@contextlib.contextmanager
def telling_refusals(cluster: Cluster | None) -> Iterator[None]:
    """Lets the others know, who wait in `compare`, that this worker refuses."""
    try:
        yield
    except UsageError as error:
        if cluster:
            _set(f"settings/{cluster.index}", json.dumps({_REFUSAL: str(error)}))
        raise


@contextlib.contextmanager
def noticing_losses(cluster: Cluster) -> Iterator[None]:
    """Turns what TensorFlow raises when a worker is gone into a sentence.

    Raises:
        LostWorkerError: A worker is gone.
    """
    try:
        yield
    except _LOST as error:
        named = cluster.named_in(str(error))
        if not named and not _ABOUT_OTHERS.search(str(error)):
            raise  # A fault of this process, such as a GPU's.
        named = named or cluster.others
        who = " or ".join(map(str, named))
        why = re.search(r"aborted by: (.*)", str(error))
        raise LostWorkerError(
            f"{cluster.own} has lost {who} ({why[1] if why else reason(error)}). Its "
            "own output tells why. Start all workers again to go on from the last "
            "checkpoint."
        ) from error


def _set(key: str, value: str) -> None:
    context.context().set_config_key_value(f"cifar10/{key}", value)


def _get(key: str, worker: Worker, timeout: float) -> str:
    try:
        return context.context().get_config_key_value(
            f"cifar10/{key}", timeout_in_ms=int(1000 * timeout)
        )
    except tf.errors.DeadlineExceededError as error:
        raise LostWorkerError(
            f"{worker} has said nothing for {timeout:g} s. Its own output may tell "
            "why; --worker_timeout is how long the others wait."
        ) from error
