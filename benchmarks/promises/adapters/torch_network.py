"""The network and the arrays in PyTorch, for the adapters of its trainers."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.promises.adapters import protocol


def build(job: protocol.Job) -> nn.Module:
    """Returns the network with its initial values."""
    torch.manual_seed(job.seed)
    x, y = job.arrays()[0]
    head = nn.Linear(16, int(y.max()) + 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    pixels = math.prod(x.shape[1:])
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), head)


def data(job: protocol.Job) -> list[TensorDataset]:
    """Returns the images to train on and those to score."""
    pairs = (map(torch.from_numpy, pair) for pair in job.arrays())
    return [TensorDataset(x / 127.5 - 1, y) for x, y in pairs]


def optimizer(job: protocol.Job, network: nn.Module) -> tuple:
    """Returns the optimizer and the schedule of its learning rate."""
    sgd = torch.optim.SGD(network.parameters(), job.learning_rate, job.momentum)
    schedules = torch.optim.lr_scheduler
    if job.constant:
        return sgd, schedules.ConstantLR(sgd, factor=1.0)
    return sgd, schedules.CosineAnnealingLR(sgd, T_max=job.steps)


def weights(network: nn.Module) -> list:
    """Returns all weights."""
    return [one.detach().numpy() for one in network.state_dict().values()]
