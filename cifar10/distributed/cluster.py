"""Reads from `TF_CONFIG` or SLURM which processes train together."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from cifar10.errors import UsageError, say

TF_CONFIG = "TF_CONFIG"

# SLURM assigns no ports to a job. Ports that depend on the job ID keep two jobs apart.
_FIRST_PORT = 20_000
_PORTS = 20_000
_MOST_TASKS = 10_000  # Far above any sensible number.


@dataclasses.dataclass(frozen=True)
class Worker:
    """One of the processes of a training run on several machines."""

    index: int  # From 0, among all workers.
    address: str  # host:port for the other workers; empty while unknown.

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The address as the pair (host, port)."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def __str__(self) -> str:
        """Names the worker in messages."""
        return f"worker {self.index}" + (f" at {self.address}" if self.address else "")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a training run, and the index of this process among them."""

    workers: tuple[Worker, ...]  # The first is the chief, which prints and writes.
    index: int  # Of this process in `workers`.

    @classmethod
    def at(cls, addresses: Sequence[str], index: int) -> Self:
        """Builds a cluster from `addresses`; this process is the worker at `index`."""
        workers = (Worker(number, address) for number, address in enumerate(addresses))
        return cls(tuple(workers), index)

    @property
    def this_worker(self) -> Worker:
        """The worker that this process is."""
        return self.workers[self.index]

    @property
    def other_workers(self) -> list[Worker]:
        """All workers but this one."""
        return [worker for worker in self.workers if worker.index != self.index]

    @property
    def is_on_loopback(self) -> bool:
        """Whether all workers listen on loopback, which only this machine reaches."""
        return all(
            re.fullmatch(r"(localhost|\[?::1\]?|127(\.\d+){3}):\d+", worker.address)
            for worker in self.workers
        )

    @property
    def workers_of_this_machine(self) -> int:
        """The number of workers on this worker's host, including this worker."""
        hosts = [worker.address.rpartition(":")[0] for worker in self.workers]
        return hosts.count(hosts[self.index])


def from_environment(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Reads the cluster from the environment; None if this process trains alone."""
    text = environ.get(TF_CONFIG, "")
    if text.strip():
        try:
            return _from_tf_config(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"TF_CONFIG={text[:300]}: {error}.\nUnset TF_CONFIG to train on this "
                'machine alone, or correct it: {"cluster": {"worker": ["host1:2222", '
                '"host2:2222"]}, "task": {"type": "worker", "index": 0}}.'
            ) from error
    return _from_slurm(environ) if is_requested(environ) else None


def is_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether `TF_CONFIG` or SLURM may describe several workers."""
    if environ.get(TF_CONFIG, "").strip():
        return True
    return _slurm_number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1


def warn_if_ignored(environ: Mapping[str, str] = os.environ) -> None:
    """Warns if `TF_CONFIG` is set, because a script with one process ignores it."""
    if environ.get(TF_CONFIG, "").strip():
        say("TF_CONFIG has no effect on this script. Use train_multi_gpu.py with it.")


def tf_config(addresses: list[str], index: int) -> str:
    """Returns the `TF_CONFIG` of the worker with `index` among `addresses`."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def _from_tf_config(text: str) -> Cluster | None:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise TypeError("it is not a JSON object")
    jobs = values.get("cluster", {})
    task = values.get("task", {})
    index = task.get("index", 0)
    if not str(index).isdecimal():
        raise ValueError(f"the task index {index!a} is not a whole number")
    for job, given in jobs.items():
        if not isinstance(given, list):
            raise TypeError(f"the addresses of the job {job} are not a list")
    name = (task.get("type", "worker"), int(index))
    addresses = {
        (job, number): _address(address)
        for job in ("chief", "worker")
        for number, address in enumerate(jobs.get(job, []))
    }
    if unknown := set(jobs) - {"chief", "worker"}:
        raise ValueError(f"jobs are chief and worker, not {', '.join(sorted(unknown))}")
    if len({*addresses.values()}) < len(addresses):
        raise ValueError("two workers have the same address")
    if len(addresses) > 1 and "index" not in task:
        raise ValueError("the task has no index, but every worker needs one")
    if jobs and name not in addresses:
        raise ValueError(f"the task, {name[0]} {name[1]}, is not in the cluster")
    if len(addresses) < 2:
        return None
    return Cluster.at([*addresses.values()], [*addresses].index(name))


def _address(address: Any) -> str:
    host, colon, port = str(address).rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16
    if not (host and colon and is_port):
        raise ValueError(f"{address!r} is not host:port")
    if ":" in host and not re.fullmatch(r"\[[^\[\]]+\]", host):
        raise ValueError(f"{address!a} is not host:port; IPv6 is written [::1]:2222")
    host.encode("idna")  # A `ValueError` for names that sockets cannot look up.
    return str(address)


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    """Returns a cluster with only the addresses of this process and of the chief.

    The chief is process 0, on the first node of SLURM's list. The other processes send
    their addresses when they connect to the chief.
    """
    tasks = _slurm_number(environ, "SLURM_STEP_NUM_TASKS")
    index = _slurm_number(environ, "SLURM_PROCID")
    port = _FIRST_PORT + _slurm_number(environ, "SLURM_JOB_ID", "0") % _PORTS
    local = _slurm_number(environ, "SLURM_LOCALID", "0")
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]  # node[2,10]
    try:
        chief = _address(f"{first}:{port}")
        this = _address(f"{environ.get('SLURMD_NODENAME', '')}:{port + local}")
        if not index < tasks <= _MOST_TASKS:
            raise ValueError(f"there is no process {index} of {tasks}")  # noqa: TRY301
        if not index and this != chief:
            raise ValueError(f"process 0 is at {this}")  # noqa: TRY301
    except ValueError as error:
        names = ["SLURM_STEP_NODELIST", "SLURMD_NODENAME", "SLURM_LOCALID"]
        names += ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"]
        shown = "\n".join(f"{name}={environ.get(name, '')[:60]!a}" for name in names)
        raise _not_slurms(f"{shown}\nThese variables describe no SLURM step") from error
    addresses = [""] * tasks
    addresses[index] = this
    addresses[0] = chief
    return Cluster.at(addresses, index)


def _slurm_number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    """Returns a number that SLURM sets; an empty variable counts as unset."""
    text = environ.get(name) or default
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise _not_slurms(f"{name}={text[:200]!a} is not a whole number")
    return int(text)


def _not_slurms(problem: str) -> UsageError:
    return UsageError(
        f"{problem}.\nStart all workers with srun. To train on this machine alone, "
        "unset SLURM_STEP_NUM_TASKS."
    )
