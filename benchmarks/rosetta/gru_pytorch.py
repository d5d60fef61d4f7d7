"""PyTorch: a module with its own fused GRU; the rest as in `cnn_pytorch.py`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from benchmarks.rosetta import cnn_pytorch


class Network(nn.Module):
    """From numbers of words to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30_000, 125)
        self.gru = nn.GRU(125, 100, batch_first=True)
        self.dense = nn.Linear(100, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Computes logits from the last state."""
        _, last = self.gru(self.embedding(words))
        return self.dense(last[0])


class Model(cnn_pytorch.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    def build(self) -> nn.Module:
        """Builds the network."""
        return Network()

    def make_optimizer(self, parameters: Iterator) -> torch.optim.Optimizer:
        """Makes the optimizer."""
        if self.task.optimizer == "sgd":
            return super().make_optimizer(parameters)
        rate, epsilon = self.task.learning_rate, self.task.epsilon
        return torch.optim.Adam(parameters, rate, eps=epsilon, fused=True)

    def load_inputs(self, inputs: np.ndarray) -> torch.Tensor:
        """Makes a tensor [batch, words]."""
        return torch.from_numpy(inputs)
