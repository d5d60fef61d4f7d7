"""PyTorch's DistributedDataParallel: two processes, averaging by gloo.

The first process is the one that answers; it tells the second what to do, and their
collective operations keep them in step. The cores are divided between them.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks import machine
from benchmarks.rivals.pytorch import Network, PyTorch

PROCESSES = 2
_PATIENCE = dt.timedelta(minutes=5)


def start(*, precision: str, batch_size: int) -> Leader:
    """Starts the second process and joins it.

    Args:
        precision: "float32", or "bfloat16" for autocast.
        batch_size: Images in a step, of both processes together.
    """
    return Leader(precision, batch_size)


class Leader:
    """The first process's half, and the pipe to the second's."""

    def __init__(self, precision: str, batch_size: int) -> None:
        self.precision = precision
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        meeting_point = Path(self._folder.name) / "meeting_point"
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._follower = context.Process(
            target=_follow,
            args=(other_end, meeting_point, precision, batch_size),
            daemon=True,
        )
        self._follower.start()
        other_end.close()
        self._half = _Half(0, meeting_point, precision, batch_size)

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the mean loss of both halves and the averaged gradients."""
        self._pipe.send(("check", values, images, labels))
        return self._half.check(values, images, labels)

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        self._pipe.send(("run", untimed, timed))
        return self._half.run(untimed, timed)

    def close(self) -> None:
        """Ends the second process."""
        self._pipe.close()
        self._follower.join()
        distributed.destroy_process_group()
        self._folder.cleanup()


class _Half:
    """What each process does."""

    def __init__(
        self, rank: int, meeting_point: Path, precision: str, batch_size: int
    ) -> None:
        # Both are on this machine, whose own name may not be known to any network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(max(1, machine.cores() // PROCESSES))
        distributed.init_process_group(
            "gloo",
            init_method=meeting_point.as_uri(),
            rank=rank,
            world_size=PROCESSES,
            timeout=_PATIENCE,
        )
        self._rank = rank
        self._replica = PyTorch(
            Network(),
            precision,
            compiled=False,
            batch_size=batch_size // PROCESSES,
            wrap=DistributedDataParallel,
        )

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the mean loss of both processes and the averaged gradients."""
        own = slice(self._rank, None, PROCESSES)
        loss, gradients = self._replica.check(values, images[own], labels[own])
        mean = torch.tensor(loss, dtype=torch.float64) / PROCESSES
        distributed.all_reduce(mean)
        return float(mean), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        return self._replica.run(untimed, timed)


def _follow(
    pipe: Connection, meeting_point: Path, precision: str, batch_size: int
) -> None:
    """Does in the second process what the first one says, until that one has gone."""
    half = _Half(1, meeting_point, precision, batch_size)
    try:
        while True:
            method, *arguments = pipe.recv()
            getattr(half, method)(*arguments)
    except EOFError:
        distributed.destroy_process_group()
