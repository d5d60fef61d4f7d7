"""The same network in PyTorch, channels last, on one device or in two processes.

The batch stays in memory. There are no moving averages, which the towers and the
tutorial's graph keep. The network takes as many threads as there are cores; two
processes share them, and average their gradients by gloo.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import machine
from benchmarks.rivals import common
from benchmarks.runner import Child

WEIGHT_DECAY = 0.004
_PATIENCE = dt.timedelta(minutes=5)


def start(
    *,
    precision: str,
    batch_size: int,
    compiled: bool = False,
    processes: int = 1,
    meeting_point: Path | None = None,
) -> PyTorch:
    """Builds the network and its optimizer.

    Args:
        precision: "float32", or "bfloat16" for autocast.
        batch_size: Images in a step, of all processes together.
        compiled: Whether loss and gradients go through `torch.compile`.
        processes: 1, or 2 for DistributedDataParallel.
        meeting_point: As for `Parallel`.
    """
    if processes > 1:
        return Parallel(precision, batch_size, meeting_point)
    torch.set_num_threads(machine.cores())
    return PyTorch(precision, batch_size, compiled=compiled)


class Network(nn.Module):
    """The tutorial's network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.local3 = nn.Linear(6 * 6 * 64, 384)
        self.local4 = nn.Linear(384, 192)
        self.softmax_linear = nn.Linear(192, common.CLASSES)
        # Rounding the size up adds the row and column that "SAME" adds at the end.
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        # PyTorch divides alpha by the number of channels in the window.
        self.norm = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes float [batch, 10] logits from [batch, 3, 24, 24] images."""
        net = self.norm(self.pool(functional.relu(self.conv1(images))))
        net = self.pool(self.norm(functional.relu(self.conv2(net))))
        # Channels last within an image too, as the others flatten it.
        net = net.permute(0, 2, 3, 1).flatten(1)  # [batch, 6 * 6 * 64]
        net = functional.relu(self.local3(net))
        net = functional.relu(self.local4(net))
        return self.softmax_linear(net)

    def weight_decay(self) -> torch.Tensor:
        """Returns what the two hidden dense layers add to the loss."""
        squares = self.local3.weight.square().sum() + self.local4.weight.square().sum()
        return WEIGHT_DECAY / 2 * squares


class PyTorch:
    """A network with its optimizer and its batch.

    Args:
        precision: "float32", or "bfloat16" for autocast.
        batch_size: Images in a step.
        compiled: Whether the loss goes through `torch.compile`.
        wrap: From the network to what computes the logits, for data parallelism.
    """

    def __init__(
        self,
        precision: str,
        batch_size: int,
        *,
        compiled: bool = False,
        wrap: Any = lambda network: network,
    ) -> None:
        torch.set_flush_denormal(True)  # As TensorFlow does.
        self.precision = precision
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._network = Network().to(self._device, memory_format=torch.channels_last)
        self._called = wrap(self._network)
        self._optimizer = torch.optim.SGD(
            self._network.parameters(), common.LEARNING_RATE
        )
        self._loss: Any = self._total_loss
        if compiled:  # On a GPU by CUDA graphs, as the starts of kernels are the limit.
            mode = "reduce-overhead" if self._device == "cuda" else None
            self._loss = torch.compile(self._total_loss, mode=mode)
        self._batch = self._on_device(*common.constant_batch(batch_size))

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the loss and the gradients of a step, in our layout."""
        self.load(values)
        with full_float32():
            loss = self._backward(self._on_device(images, labels))
        gradients = {
            name: in_our_order(parameter.grad).cpu().numpy().copy()
            for name, parameter in by_our_names(self._network).items()
        }
        return float(loss), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        return common.seconds_of(self._step, untimed, timed)

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Sets the variables."""
        with torch.no_grad():
            for name, parameter in by_our_names(self._network).items():
                in_our_order(parameter).copy_(torch.from_numpy(values[name]))

    def _step(self) -> torch.Tensor:
        loss = self._backward(self._batch)
        self._optimizer.step()
        return loss

    def _backward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = self._loss(*batch)
        loss.backward()
        return loss.detach()

    def _total_loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shorter = self.precision != "float32"
        with torch.autocast(self._device, torch.bfloat16, enabled=shorter):
            logits = self._called(images)
        cross_entropy = functional.cross_entropy(logits.float(), labels)
        return cross_entropy + self._network.weight_decay()

    def _on_device(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns images [batch, 3, 24, 24], stored channels last, and labels."""
        planes = torch.from_numpy(images).to(self._device).permute(0, 3, 1, 2)
        return planes, torch.from_numpy(labels).long().to(self._device)


class Parallel(PyTorch):
    """One of two processes, each with half of the batch.

    The first starts the second and tells it what to do; their collective operations
    keep them in step.

    Args:
        precision: "float32", or "bfloat16" for autocast.
        batch_size: Images in a step, of both processes together.
        meeting_point: The file where the second finds the first; None in the first.
    """

    def __init__(
        self, precision: str, batch_size: int, meeting_point: Path | None = None
    ) -> None:
        self._rank = 1 if meeting_point else 0
        self._resources = contextlib.ExitStack()
        if not meeting_point:
            folder = tempfile.TemporaryDirectory(prefix="benchmark-")
            meeting_point = Path(self._resources.enter_context(folder), "meeting_point")
            options = {"precision": precision, "batch_size": batch_size}
            options |= {"processes": 2, "meeting_point": meeting_point}
            # Each waits for the other, so the first needs a thread to ask the second.
            self._thread = ThreadPoolExecutor(1)
            self._second = self._thread.submit(Child, __name__, options)
        # Both are on this machine, whose own name may not be known to any network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(max(1, machine.cores() // 2))
        distributed.init_process_group(
            "gloo",
            init_method=meeting_point.as_uri(),
            rank=self._rank,
            world_size=2,
            timeout=_PATIENCE,
        )
        super().__init__(precision, batch_size // 2, wrap=DistributedDataParallel)

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the mean loss of both processes and the averaged gradients."""
        self._tell("check", values, images, labels)
        own = slice(self._rank, None, 2)
        loss, gradients = super().check(values, images[own], labels[own])
        mean = torch.tensor(loss, dtype=torch.float64) / 2
        distributed.all_reduce(mean)
        return float(mean), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        self._tell("run", untimed, timed)
        return super().run(untimed, timed)

    def close(self) -> None:
        """Ends the second process, and leaves the group."""
        if self._rank == 0:
            self._second.result().close()
            self._thread.shutdown()
        distributed.destroy_process_group()
        self._resources.close()

    def _tell(self, method: str, *arguments: object) -> None:
        if self._rank == 0:
            self._thread.submit(self._second.result().ask, method, *arguments)


def in_our_order(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a view in our order of dimensions: inputs before outputs."""
    if parameter.dim() == 4:
        return parameter.permute(2, 3, 1, 0)
    return parameter.t() if parameter.dim() == 2 else parameter


def by_our_names(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns a network's parameters by our names."""
    kinds = {"weight": "kernel", "bias": "bias"}
    found = {}
    for name, parameter in network.named_parameters():
        layer, _, kind = name.partition(".")
        if not layer.startswith("norm"):
            found[f"{layer}/{kinds[kind]}"] = parameter
        elif kind == "bias":
            found[f"{layer}/beta"] = parameter
    return found


def full_float32() -> contextlib.AbstractContextManager:
    """Keeps PyTorch from shortening float32 to TensorFloat-32 on a GPU."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
