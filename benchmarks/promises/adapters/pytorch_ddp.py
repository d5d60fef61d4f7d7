"""PyTorch's DistributedDataParallel over gloo, as its tutorials.

They start it by torchrun, with DistributedSampler, and save a snapshot by torch.save at
ends of epochs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import protocol
import torch
import torch_network
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loader(
    job: protocol.Job, images: TensorDataset, *, shuffle: bool
) -> tuple[DataLoader, DistributedSampler]:
    """Returns the batches of this process."""
    sampler: DistributedSampler = DistributedSampler(
        images, shuffle=shuffle, seed=job.seed
    )
    size = job.batch_size // job.workers // job.accumulate
    return DataLoader(images, size, sampler=sampler), sampler


def train(job: protocol.Job) -> None:
    """Trains, from the last snapshot if there is one."""
    images, _ = torch_network.data(job)
    batches, sampler = loader(job, images, shuffle=True)
    network = torch_network.build(job)
    parallel = DistributedDataParallel(network)
    optimizer, schedule = torch_network.optimizer(job, network)
    is_first = distributed.get_rank() == 0
    snapshot, epoch = Path(job.folder, "snapshot.pt"), 0
    if snapshot.exists():
        found = torch.load(snapshot)
        network.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        epoch = found["epoch"]
    step = epoch * job.epoch_steps
    while step < job.steps:
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(batches, start=1):
            updates = number % job.accumulate == 0
            with contextlib.nullcontext() if updates else parallel.no_sync():
                loss = functional.cross_entropy(parallel(x), y) / job.accumulate
                loss.backward()
            if not updates:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if is_first:
                protocol.reached(job, step, schedule.get_last_lr()[0])
            schedule.step()
            if step == job.steps:
                break
        epoch += 1
        if is_first:
            state = {"model": network, "optimizer": optimizer, "schedule": schedule}
            found = {name: one.state_dict() for name, one in state.items()}
            torch.save({**found, "epoch": epoch}, snapshot)
            print(f"Epoch {epoch} | Training snapshot saved at {snapshot}")
    if is_first:
        protocol.answer(job, torch_network.weights(network), step=step)


def evaluate(job: protocol.Job) -> None:
    """Scores the snapshot, each process its share."""
    _, images = torch_network.data(job)
    network = torch_network.build(job)
    network.load_state_dict(torch.load(Path(job.folder, "snapshot.pt"))["model"])
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader(job, images, shuffle=False)[0]:
            logits = network(x)
            loss = functional.cross_entropy(logits, y, reduction="sum")
            right = (logits.argmax(1) == y).sum()
            sums += torch.stack([loss, right, torch.tensor(len(y))])
    distributed.all_reduce(sums)
    loss, right, count = sums.tolist()
    if distributed.get_rank() == 0:
        protocol.answer(job, loss=loss / count, accuracy=right / count)


def main() -> None:
    """Does the job, in as many processes as it says."""
    job = protocol.read_job()
    if job.task == "describe":
        said = "the loop is yours"
        protocol.describe(
            job,
            "PyTorch DistributedDataParallel",
            torch.__version__,
            "snapshot.pt",
            "https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html",
            lacks={"resumed_best": said, "nan": said},
        )
    elif "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(job.workers), *sys.argv]
        os.execv(sys.executable, torchrun)  # noqa: S606
    else:
        distributed.init_process_group("gloo")
        (evaluate if job.task == "evaluate" else train)(job)
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
