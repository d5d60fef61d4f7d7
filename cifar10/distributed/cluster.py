"""Reads from `TF_CONFIG` or SLURM which processes train together."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from cifar10.errors import UsageError, reason

TF_CONFIG = "TF_CONFIG"
_TASKS = "SLURM_STEP_NUM_TASKS"
_SLURM = (
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURMD_NODENAME"),
)
# Raised while reading a TF_CONFIG of another form.
_NO_CLUSTER = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RecursionError),
)
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+):[0-9]{1,5}")  # IPv6 has brackets.

# SLURM assigns no ports to a job. Ports that depend on the job ID keep two jobs apart.
_FIRST_PORT = 20_000
_PORTS = 20_000
_MOST = 100_000  # Nodes, or workers of one; more are a damaged list.


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a training run, and the index of this process among them."""

    addresses: tuple[str, ...]  # host:port of each. The first is the chief.
    index: int  # This process's place in `addresses`.

    @property
    def others(self) -> list[int]:
        """The indices of all workers but this one."""
        return [index for index in range(len(self.addresses)) if index != self.index]

    @property
    def is_on_loopback(self) -> bool:
        """Whether all workers listen on loopback, which only this machine reaches."""
        local = ("127.", "localhost:", "[::1]:")
        return all(address.startswith(local) for address in self.addresses)

    def name(self, *indices: int) -> str:
        """Names workers in messages; without indices, names this process."""
        named = indices or [self.index]
        return ", ".join(f"worker {n} at {self.addresses[n]}" for n in named)

    def host_and_port(self, index: int) -> tuple[str, int]:
        """Returns a worker's address as the pair (host, port)."""
        host, _, port = self.addresses[index].rpartition(":")
        return host.strip("[]"), int(port)


def from_environment(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Reads the cluster from the environment; None if this process trains alone."""
    if not (text := environ.get(TF_CONFIG, "")).strip():
        return _from_slurm(environ) if is_requested(environ) else None
    try:
        return _from_tf_config(json.loads(text))
    except _NO_CLUSTER as error:
        raise UsageError(
            f"TF_CONFIG={text[:300]!r} does not name several workers and this process "
            f"among\nthem: {reason(error)[:300]}.\nUnset it to train only on this "
            'machine, or correct it:\n{"cluster": {"worker": ["host1:2222", '
            '"host2:2222"]}, "task": {"type": "worker", "index": 0}}.'
        ) from error


def is_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether `TF_CONFIG` or SLURM may describe several workers."""
    tasks = environ.get(_TASKS, "")
    return bool(environ.get(TF_CONFIG, "").strip()) or tasks not in ("", "0", "1")


def tf_config(addresses: list[str], index: int) -> str:
    """Returns the `TF_CONFIG` of the worker with `index` among `addresses`."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def _from_tf_config(values: Any) -> Cluster | None:
    jobs, task = values.get("cluster", {}), values.get("task", {})
    workers = {
        (job, number): address
        for job in ("chief", "worker")
        for number, address in enumerate(jobs.get(job, []))
    }
    addresses = tuple(workers.values())
    if unknown := jobs.keys() - {"chief", "worker"}:
        raise ValueError(f"tasks of type {min(unknown)} are not supported")
    if len({*addresses}) < len(addresses):
        raise ValueError("an address appears twice")
    if wrong := [name for name in addresses if not _ADDRESS.fullmatch(name)]:
        raise ValueError(f"{wrong[0]!r} is not of the form host:port")
    if len(addresses) < 2:
        return None
    if (place := (task.get("type", "worker"), int(task["index"]))) not in workers:
        raise ValueError(f"no {place[0]} has index {place[1]}; the first has 0")
    return Cluster(addresses, [*workers].index(place))


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    """Returns the cluster of a SLURM step; each node has consecutive workers."""
    # TensorFlow is imported only after the flags were checked.
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

    try:
        job, index, nodes, tasks, this = (environ[name] for name in _SLURM)
        port = _FIRST_PORT + int(job) % _PORTS
        if max([_count_nodes(nodes), *map(int, re.findall(r"\d+", tasks))]) > _MOST:
            raise ValueError(nodes)  # noqa: TRY301
        hosts = slurm_cluster_resolver.expand_hostlist(nodes)
        counts = slurm_cluster_resolver.expand_tasks_per_node(tasks)
        addresses = [
            f"{host}:{port + number}"
            for host, count in zip(hosts, counts, strict=True)
            for number in range(count)
        ]
        if int(index) < 0 or addresses[int(index)].rpartition(":")[0] != this:
            raise ValueError(addresses)  # noqa: TRY301
    except (ValueError, LookupError) as error:
        given = {name: environ.get(name) for name in _SLURM}
        raise UsageError(
            f"SLURM's variables do not give this process a node of the step: {given}. "
            "Start all workers with srun, and several per node with "
            f"--distribution=block. To train only on this machine, unset {_TASKS}."
        ) from error
    return Cluster(tuple(addresses), int(index))


def _count_nodes(nodes: str) -> int:
    """Counts the nodes in a list such as `a[1-9]b[1,4-7],c`, without expanding it."""
    total = 0
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        groups = re.findall(r"\[([^\]]*)\]", name)
        ranges = (re.findall(r"(\d+)(?:-(\d+))?", group) for group in groups)
        total += math.prod(sum(int(b or a) - int(a) + 1 for a, b in r) for r in ranges)
    return total
