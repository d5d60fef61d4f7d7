"""Which machines train together: read from `TF_CONFIG` or from SLURM."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from cifar10.errors import UsageError

TF_CONFIG = "TF_CONFIG"

# SLURM gives a job no ports. One from its number keeps two jobs on a machine apart.
_FIRST_PORT = 20_000
_PORTS = 20_000


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process of a training on several machines.

    Attributes:
        job: `chief` or `worker`.
        task: Its number within the job.
        address: host:port at which the others reach it.
    """

    job: str
    task: int
    address: str

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The address as sockets take it."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def __str__(self) -> str:
        """Names the worker in messages."""
        return f"{self.job} {self.task} at {self.address}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a training, and which of them this process is.

    Attributes:
        workers: All of them; the first is the chief, which alone prints and writes.
        index: The place of this one.
    """

    workers: tuple[Worker, ...]
    index: int

    @property
    def own(self) -> Worker:
        """The worker that this process is."""
        return self.workers[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    @property
    def others(self) -> list[Worker]:
        """The other workers."""
        return [worker for worker in self.workers if worker is not self.own]

    def named_in(self, message: str) -> list[Worker]:
        """Returns the other workers that an error of TensorFlow names."""
        found = re.findall(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message)
        named = {(job, int(task)) for job, task in found}
        return [one for one in self.others if (one.job, one.task) in named]


def from_environment(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Reads which machines train together.

    Args:
        environ: Environment variables.

    Returns:
        None if this process trains alone.

    Raises:
        UsageError: `TF_CONFIG` is not what TensorFlow takes.
    """
    text = environ.get(TF_CONFIG, "")
    if text.strip():
        return _from_tf_config(text)
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _from_slurm(environ)
    return None


def say_if_ignored(environ: Mapping[str, str] = os.environ) -> None:
    """Says, where one process trains alone, that it does not heed `TF_CONFIG`."""
    if environ.get(TF_CONFIG, "").strip():
        print(
            "TF_CONFIG is set, but this script trains alone; train_multi_gpu.py heeds "
            "it.",
            file=sys.stderr,
            flush=True,
        )


def tf_config(addresses: list[str], index: int) -> str:
    """Returns the `TF_CONFIG` of one of several workers."""
    return json.dumps(
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
    )


def _from_tf_config(text: str) -> Cluster | None:
    try:
        values = json.loads(text)
        jobs = values.get("cluster", {})
        task = values.get("task", {})
        own = (task.get("type", "worker"), int(task.get("index", 0)))
        workers = tuple(
            Worker(job, number, _address(address))
            for job in ("chief", "worker")
            for number, address in enumerate(jobs.get(job, []))
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise _bad(text, str(error)) from error
    if not jobs:
        return None
    if other := set(jobs) - {"chief", "worker"}:
        raise _bad(text, f"there is no use for the job {', '.join(sorted(other))}")
    if len({worker.address for worker in workers}) < len(workers):
        raise _bad(text, "two workers have one address")
    places = [(worker.job, worker.task) for worker in workers]
    if own not in places:
        raise _bad(text, f"its task, {own[0]} {own[1]}, is not in its cluster")
    return Cluster(workers, places.index(own)) if len(workers) > 1 else None


def _address(address: Any) -> str:
    host, colon, port = str(address).rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{address!r} is not host:port")
    return str(address)


def _bad(text: str, why: str) -> UsageError:
    return UsageError(
        f"TF_CONFIG={text[:300]}: {why}. It is like "
        '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": '
        '"worker", "index": 0}}; unset it to train on this machine alone.'
    )


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    """Asks TensorFlow's resolver, and finds this process by its node's name.

    The resolver sorts the nodes as text, node10 before node2, while SLURM counts its
    processes in another order; so the number of this one is not SLURM's (TF 2.21).
    """
    import tensorflow as tf

    number = int(environ.get("SLURM_JOB_ID", "0"))
    port = _FIRST_PORT + number % _PORTS
    tasks = int(environ["SLURM_STEP_NUM_TASKS"])
    # Which GPUs a process sees is SLURM's business; the resolver's division by their
    # number fails where there are none, so it is told one for each process.
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        port_base=port, gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
    )
    addresses = resolver.cluster_spec().job_tasks("worker")
    local = int(environ.get("SLURM_LOCALID", "0"))
    own = f"{environ.get('SLURMD_NODENAME', '')}:{port + local}"
    if own not in addresses:
        raise UsageError(
            f"SLURM's step has the processes {', '.join(addresses)}, but not {own}, "
            "which this one is. Start it with srun."
        )
    return Cluster(
        tuple(
            Worker("worker", task, address) for task, address in enumerate(addresses)
        ),
        addresses.index(own),
    )
