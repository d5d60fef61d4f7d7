"""PyTorch: a module, an optimizer and a loop of one's own; eager, as most train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.rosetta import weights
from benchmarks.rosetta.task import Batch, Task, Values, in_parts


class Network(nn.Module):
    """From images to logits."""

    def __init__(self, dropout: tuple[float, float, float]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 50, 3, padding="same")
        self.conv2 = nn.Conv2d(50, 50, 3, padding="same")
        self.conv3 = nn.Conv2d(50, 100, 3, padding="same")
        self.conv4 = nn.Conv2d(100, 100, 3, padding="same")
        self.dense1 = nn.Linear(8 * 8 * 100, 512)
        self.dense2 = nn.Linear(512, 10)
        self.dropout1, self.dropout2, self.dropout3 = map(nn.Dropout, dropout)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes logits; `train()` and `eval()` switch dropout on and off."""
        net = functional.relu(self.conv1(images))
        net = functional.relu(self.conv2(net))
        net = self.dropout1(functional.max_pool2d(net, 2))
        net = functional.relu(self.conv3(net))
        net = functional.relu(self.conv4(net))
        net = self.dropout2(functional.max_pool2d(net, 2))
        net = net.permute(0, 2, 3, 1).flatten(1)  # Channels last, as the others.
        net = self.dropout3(functional.relu(self.dense1(net)))
        return self.dense2(net)


class Model:
    """A network with its loss and its optimizer."""

    def __init__(self, task: Task) -> None:
        torch.set_flush_denormal(True)  # As TensorFlow and JAX do.
        self.task = task
        self.network = self.build()
        self.loss = nn.CrossEntropyLoss()  # Of logits: the only softmax is in here.

    def build(self) -> nn.Module:
        """Builds the network."""
        return Network(self.task.dropout)

    def make_optimizer(self, parameters: Iterator) -> torch.optim.Optimizer:
        """Makes the optimizer."""
        rate, momentum = self.task.learning_rate, self.task.momentum
        return torch.optim.SGD(parameters, rate, momentum, fused=True)

    def load_inputs(self, inputs: np.ndarray) -> torch.Tensor:
        """Makes a tensor [batch, channels, height, width]."""
        # A view: channels stay last in memory, which is faster on a CPU too.
        return torch.from_numpy(inputs).permute(0, 3, 1, 2)

    def load(self, values: Values) -> None:
        """Begins anew from these values."""
        theirs = weights.to_pytorch(values)
        self.network.load_state_dict(
            {name: torch.from_numpy(one.copy()) for name, one in theirs.items()}
        )
        self.optimizer = self.make_optimizer(self.network.parameters())

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of now."""
        state = self.network.state_dict()
        return weights.from_pytorch({name: one.numpy() for name, one in state.items()})

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        self.network.train()
        losses = []
        for inputs, labels in batches:
            self.optimizer.zero_grad()
            logits = self.network(self.load_inputs(inputs))
            loss = self.loss(logits, torch.from_numpy(labels).long())
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Computes logits."""
        self.network.eval()
        with torch.no_grad():
            logits = [self.network(self.load_inputs(part)) for part in in_parts(inputs)]
        return torch.cat(logits).numpy()
