"""The same network in PyTorch, channels last, on one device.

The batch stays in memory. There are no moving averages, which the towers and the
tutorial's graph keep. The network takes as many threads as there are cores.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import machine
from benchmarks.rivals import common

WEIGHT_DECAY = 0.004


def start(*, precision: str, compiled: bool, batch_size: int) -> PyTorch:
    """Builds the network and its optimizer.

    Args:
        precision: "float32", or "bfloat16" for autocast.
        compiled: Whether loss and gradients go through `torch.compile`.
        batch_size: Images in a step.
    """
    torch.set_num_threads(machine.cores())
    return PyTorch(Network(), precision, compiled, batch_size)


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
        network: The network.
        precision: "float32", or "bfloat16" for autocast.
        compiled: Whether the loss goes through `torch.compile`.
        batch_size: Images in a step.
        wrap: From the network to what computes the logits, for data parallelism.
    """

    def __init__(
        self,
        network: Network,
        precision: str,
        compiled: bool,
        batch_size: int,
        wrap: Any = lambda network: network,
    ) -> None:
        torch.set_flush_denormal(True)  # As TensorFlow does.
        self.precision = precision
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._network = network.to(self._device, memory_format=torch.channels_last)
        self._called = wrap(self._network)
        self._optimizer = torch.optim.SGD(network.parameters(), common.LEARNING_RATE)
        self._loss = torch.compile(self._total_loss) if compiled else self._total_loss
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
            for name, parameter in self._parameters().items()
        }
        return float(loss), gradients

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps."""
        return common.seconds_of(self._step, untimed, timed)

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Sets the variables."""
        with torch.no_grad():
            for name, parameter in self._parameters().items():
                in_our_order(parameter).copy_(torch.from_numpy(values[name]))

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by our names."""
        kinds = {"weight": "kernel", "bias": "bias"}
        found = {}
        for name, parameter in self._network.named_parameters():
            layer, _, kind = name.partition(".")
            found[f"{layer}/{kinds[kind]}"] = parameter
        return found

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


def in_our_order(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a view in our order of dimensions: inputs before outputs."""
    if parameter.dim() == 4:
        return parameter.permute(2, 3, 1, 0)
    return parameter.t() if parameter.dim() == 2 else parameter


@contextlib.contextmanager
def full_float32() -> Any:
    """Keeps PyTorch from shortening float32 to TensorFloat-32 on a GPU."""
    shortens = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = shortens
