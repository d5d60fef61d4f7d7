"""Brings the workers of a training together, and notices when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar10.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UsageError, reason

# A worker whose process ends is noticed at once, by its closed connections. One whose
# machine or network is gone is missed after this time; shorter interruptions pass.
HEARTBEAT_SECONDS = 25
# The exit code of a lost worker; see `cli.py`.
_EXIT_LOST_WORKER = 75

_SECONDS_UNTIL_SAID = 5.0
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
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
        UsageError: This worker's port is taken.
        LostWorkerError: The workers cannot be connected.
    """
    _check_port(cluster.own)
    spec: dict[str, list[str]] = {}
    for worker in cluster.workers:
        spec.setdefault(worker.job, []).append(worker.address)
    milliseconds = int(1000 * timeout)
    # The strategy would do this itself, with a patience of an hour. There is no public
    # way to say how long (TensorFlow 2.21).
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{cluster.workers[0].job}/replica:0/task:0",
        # Longer than our own patience, which can name who is missing.
        cluster_register_timeout_in_ms=milliseconds + 60_000,
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_SECONDS,
        shutdown_barrier_timeout_in_ms=1000 * HEARTBEAT_SECONDS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
            for job, addresses in spec.items()
        ],
    )
    communication = tf.distribute.experimental.CommunicationImplementation
    with _watching(cluster, timeout), noticing_losses(cluster):
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
        refusal = _get("chief", timeout)
        if refusal:
            raise UsageError(f"{cluster.workers[0]} has refused: {refusal}")
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
    texts = [
        _get(f"settings/{index}", timeout) for index in range(len(cluster.workers))
    ]
    first, *others = [json.loads(text) for text in texts]
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
def noticing_losses(cluster: Cluster) -> Iterator[None]:
    """Turns what TensorFlow raises when a worker is gone into a sentence.

    Raises:
        LostWorkerError: A worker is gone.
    """
    try:
        yield
    except _LOST as error:
        named = cluster.named_in(str(error)) or cluster.others
        who = " or ".join(map(str, named))
        why = re.search(r"aborted by: (.*)", str(error))
        raise LostWorkerError(
            f"{cluster.own} has lost {who} ({why[1] if why else reason(error)}). Its "
            "own output tells "
            "why. Start all workers again to go on from the last checkpoint."
        ) from error


def _set(key: str, value: str) -> None:
    context.context().set_config_key_value(f"cifar10/{key}", value)


def _get(key: str, timeout: float) -> str:
    return context.context().get_config_key_value(
        f"cifar10/{key}", timeout_in_ms=int(1000 * timeout)
    )


def _check_port(own: Worker) -> None:
    port = int(own.address.rpartition(":")[2])
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"{own}: port {port} of this machine cannot be used: {reason(error)}. "
                "End the process that has it, or give another port in TF_CONFIG."
            ) from error


@contextlib.contextmanager
def _watching(cluster: Cluster, timeout: float) -> Iterator[None]:
    """Says who has not come yet, and ends the process when it is too late.

    TensorFlow waits in a call that nothing interrupts, and would not say for whom.
    """
    connected = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(cluster, timeout, connected), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        connected.set()
        thread.join()


def _watch(cluster: Cluster, timeout: float, connected: threading.Event) -> None:
    began = time.monotonic()
    missing = cluster.others
    said = False
    while missing and not connected.wait(0.5):
        missing = [worker for worker in missing if not _answers(worker)]
        waited = time.monotonic() - began
        who = ", ".join(map(str, missing))
        if missing and waited > timeout:
            _say(
                f"{cluster.own} has waited {timeout:g} s for {who}, in vain. Start it, "
                "check that its address in TF_CONFIG is right and that no firewall is "
                "in between, or wait longer with --worker_timeout."
            )
            os._exit(_EXIT_LOST_WORKER)
        if missing and waited > _SECONDS_UNTIL_SAID and not said:
            said = True
            _say(f"{cluster.own} is waiting for {who}, {timeout:g} s at most.")


def _answers(worker: Worker) -> bool:
    host, _, port = worker.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
