"""PyTorch's DistributedDataParallel over gloo, as its tutorials.

They start it by torchrun, with DistributedSampler, and save a snapshot by torch.save at
ends of epochs.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def train(
    network: nn.Module,
    optimizer: optim.Optimizer,
    schedule: optim.lr_scheduler.LRScheduler,
    images: Dataset,
    snapshot: Path,
    *,
    steps: int,
    batch_size: int,
    accumulate: int,
    seed: int,
    on_update: Callable[[int, float], None],
) -> int:
    """Trains, from the snapshot if there is one; returns the updates."""
    distributed.init_process_group("gloo")
    sampler: DistributedSampler = DistributedSampler(images, seed=seed)
    batches = DataLoader(images, batch_size, sampler=sampler)
    parallel = DistributedDataParallel(network)
    parts = {"model": network, "optimizer": optimizer, "schedule": schedule}
    epoch = 0
    if snapshot.exists():
        found = torch.load(snapshot)
        for name, part in parts.items():
            part.load_state_dict(found[name])
        epoch = found["epoch"]
    step = epoch * (len(batches) // accumulate)
    while step < steps:
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(batches, start=1):
            updates = number % accumulate == 0
            with contextlib.nullcontext() if updates else parallel.no_sync():
                loss = functional.cross_entropy(parallel(x), y) / accumulate
                loss.backward()
            if not updates:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            on_update(step, schedule.get_last_lr()[0])
            schedule.step()
            if step == steps:
                break
        epoch += 1
        if distributed.get_rank() == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch}, snapshot)
            print(f"Epoch {epoch} | Training snapshot saved at {snapshot}")
    distributed.destroy_process_group()
    return step


def evaluate(
    network: nn.Module, images: Dataset, snapshot: Path, batch_size: int
) -> tuple[float, float]:
    """Returns loss and accuracy of a snapshot, of which each process has a share."""
    distributed.init_process_group("gloo")
    sampler: DistributedSampler = DistributedSampler(images, shuffle=False)
    network.load_state_dict(torch.load(snapshot)["model"])
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in DataLoader(images, batch_size, sampler=sampler):
            logits = network(x)
            loss = functional.cross_entropy(logits, y, reduction="sum")
            right = (logits.argmax(1) == y).sum()
            sums += torch.stack([loss, right, torch.tensor(len(y))])
    distributed.all_reduce(sums)
    distributed.destroy_process_group()
    loss, right, count = sums.tolist()
    return loss / count, right / count
