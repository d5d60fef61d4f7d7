"""Which machines train together: read from `TF_CONFIG` or from SLURM."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from cifar10.errors import UsageError, say

TF_CONFIG = "TF_CONFIG"

# SLURM assigns no ports to a job. The job's number keeps two jobs on a machine apart.
_FIRST_PORT = 20_000
_PORTS = 20_000
_MOST_TASKS = 10_000  # Far above any sensible number: all addresses are written out.


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process of a training on several machines."""

    job: str  # "chief" or "worker".
    task: int  # Number within the job.
    address: str  # host:port at which the other workers reach it.

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
    """The workers of a training, and which of them this process is."""

    workers: tuple[Worker, ...]  # The first is the chief, which prints and writes.
    index: int  # Of this process in `workers`.

    @property
    def this_worker(self) -> Worker:
        """The worker that this process is."""
        return self.workers[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    @property
    def other_workers(self) -> list[Worker]:
        """All workers but this one."""
        return [worker for worker in self.workers if worker is not self.this_worker]

    @property
    def is_on_loopback(self) -> bool:
        """Whether all workers are on this machine, at addresses that no other has."""
        hosts = {worker.host_and_port[0] for worker in self.workers}
        return all(re.fullmatch(r"localhost|::1|127(\.\d+){3}", host) for host in hosts)

    @property
    def workers_of_this_machine(self) -> int:
        """How many workers there are at this one's host, itself included."""
        host, _ = self.this_worker.host_and_port
        return [worker.host_and_port[0] for worker in self.workers].count(host)

    def mentioned_in(self, message: str) -> list[Worker]:
        """Returns the other workers that an error message of TensorFlow names."""
        found = re.findall(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message)
        names = {(job, int(task)) for job, task in found}
        return [
            worker
            for worker in self.other_workers
            if (worker.job, worker.task) in names
        ]


def from_environment(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Returns the workers that train together; None if this process trains alone."""
    text = environ.get(TF_CONFIG, "")
    if text.strip():
        try:
            return _from_tf_config(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"TF_CONFIG={text[:300]}: {error}.\nUnset it to train on this machine "
                'alone, or correct it as in {"cluster": {"worker": ["host1:2222", '
                '"host2:2222"]}, "task": {"type": "worker", "index": 0}}.'
            ) from error
    return _from_slurm(environ) if is_requested(environ) else None


def is_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether there may be several workers; needs no TensorFlow."""
    if environ.get(TF_CONFIG, "").strip():
        return True
    return _slurm_number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1


def warn_if_ignored(environ: Mapping[str, str] = os.environ) -> None:
    """Prints a warning if `TF_CONFIG` is set, for a script that trains alone."""
    if environ.get(TF_CONFIG, "").strip():
        say("TF_CONFIG is ignored by this script; train_multi_gpu.py uses it.")


def tf_config(addresses: list[str], index: int) -> str:
    """Returns the `TF_CONFIG` of the worker at an index of `addresses`."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def _from_tf_config(text: str) -> Cluster | None:
    values = json.loads(text)
    jobs = values.get("cluster", {})
    task = values.get("task", {})
    index = task.get("index", 0)
    if not str(index).isdecimal():
        raise ValueError(f"its task's index, {index!a}, is no whole number")
    name = (task.get("type", "worker"), int(index))
    workers = {
        (job, number): Worker(job, number, _address(address))
        for job in ("chief", "worker")
        for number, address in enumerate(jobs.get(job, []))
    }
    if unknown := set(jobs) - {"chief", "worker"}:
        raise ValueError(f"there is no use for the job {', '.join(sorted(unknown))}")
    if len({worker.address for worker in workers.values()}) < len(workers):
        raise ValueError("two workers have one address")
    if jobs and name not in workers:
        raise ValueError(f"its task, {name[0]} {name[1]}, is not in its cluster")
    if len(workers) < 2:
        return None
    return Cluster(tuple(workers.values()), [*workers].index(name))


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
    """Reads the cluster from TensorFlow's resolver, and this process's place in it.

    The resolver sorts the nodes as text, node10 before node2, while SLURM counts its
    processes in another order. So this process is found by the name of its node, not
    by its number in SLURM (TensorFlow 2.21).
    """
    tasks = _slurm_number(environ, "SLURM_STEP_NUM_TASKS", 1)
    port = _FIRST_PORT + _slurm_number(environ, "SLURM_JOB_ID", 0) % _PORTS
    local = _slurm_number(environ, "SLURM_LOCALID", 0)
    names = ["NODELIST", "TASKS_PER_NODE", "NUM_TASKS"]
    values = {
        name: environ.get(name, "")
        for name in ("SLURM_PROCID", *(f"SLURM_STEP_{name}" for name in names))
    }
    try:
        # The resolver writes out [1-9] and (x9) of any length.
        written = "".join(re.findall(r"\[[^]]*|\(x\d+", f"{values}"))
        for first, last in re.findall(r"(?:(\d+)-|\(x)(\d+)", written):
            if int(last) - int(first or 1) >= min(tasks, _MOST_TASKS):
                raise ValueError(last)  # noqa: TRY301 - as the resolver does.
        import tensorflow as tf

        # Which GPUs a process sees is SLURM's business; the resolver's division by
        # their number fails if there are none, so it is given one for each process.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = [*map(_address, resolver.cluster_spec().job_tasks("worker"))]
    except (ValueError, RuntimeError) as error:
        shown = "\n".join(f"{name}={value[:60]!a}" for name, value in values.items())
        raise _not_slurms(f"{shown}\nThese do not describe a step of SLURM") from error
    address = f"{environ.get('SLURMD_NODENAME', '')}:{port + local}"
    if address not in addresses:
        raise UsageError(
            f"SLURM's step has the processes {', '.join(addresses)}, but not this one, "
            f"{address}.\nStart it with srun."
        )
    workers = (Worker("worker", task, host) for task, host in enumerate(addresses))
    return Cluster(tuple(workers), addresses.index(address))


def _slurm_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns a number that SLURM sets; an empty variable counts as unset."""
    text = environ.get(name, "") or str(default)
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise _not_slurms(f"{name}={text[:200]!a}: it is a whole number in SLURM")
    return int(text)


def _not_slurms(problem: str) -> UsageError:
    return UsageError(
        f"{problem}.\nStart all workers with srun; to train on this machine alone, "
        "unset SLURM_STEP_NUM_TASKS."
    )
