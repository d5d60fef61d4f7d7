"""The network and the arrays in PyTorch, for the adapters of its trainers."""

from __future__ import annotations

import math

import protocol
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build(job: protocol.Job) -> nn.Module:
    """Returns the network with its initial values."""
    torch.manual_seed(job.seed)
    x, y, *_ = job.arrays()
    head = nn.Linear(16, max(4, int(y.max()) + 1))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    pixels = math.prod(x.shape[1:])
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), head)


def data(job: protocol.Job) -> tuple[TensorDataset, TensorDataset]:
    """Returns the images to train on and those to score."""
    x, y, x_test, y_test = map(torch.from_numpy, job.arrays())
    pairs = (x, y), (x_test, y_test)
    trained, scored = (TensorDataset(x / 127.5 - 1, y) for x, y in pairs)
    return trained, scored


def optimizer(
    job: protocol.Job, network: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Returns the optimizer and the schedule of its learning rate."""
    sgd = torch.optim.SGD(
        network.parameters(), lr=job.learning_rate, momentum=job.momentum
    )
    schedules = torch.optim.lr_scheduler
    if job.constant:
        return sgd, schedules.ConstantLR(sgd, factor=1.0)
    return sgd, schedules.CosineAnnealingLR(sgd, T_max=job.steps)


def weights(network: nn.Module) -> list:
    """Returns all weights."""
    return [one.detach().numpy() for one in network.state_dict().values()]
