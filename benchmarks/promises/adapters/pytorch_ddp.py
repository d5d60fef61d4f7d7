"""PyTorch's DistributedDataParallel."""

from pathlib import Path

import torch

from benchmarks.promises.adapters import protocol, torch_network
from benchmarks.promises.trainers import pytorch_ddp


def train(job: protocol.Job) -> tuple:
    """Trains, from the last snapshot if there is one."""
    network = torch_network.build(job)
    step = pytorch_ddp.train(
        network,
        *torch_network.optimizer(job, network),
        torch_network.data(job)[0],
        Path(job.folder, "snapshot.pt"),
        steps=job.steps,
        batch_size=job.worker_batch_size,
        accumulate=job.accumulate,
        seed=job.seed,
        on_update=job.reached,
    )
    return torch_network.weights(network), step, None


def evaluate(job: protocol.Job) -> tuple:
    """Scores the snapshot."""
    network, (_, images) = torch_network.build(job), torch_network.data(job)
    snapshot = Path(job.folder, "snapshot.pt")
    return pytorch_ddp.evaluate(network, images, snapshot, job.worker_batch_size)


protocol.serve(
    train,
    evaluate,
    name="PyTorch DistributedDataParallel",
    version=torch.__version__,
    checkpoint="snapshot.pt",
    documents="https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html",
    lacks=dict.fromkeys(["resumed_best", "nan"], "the loop is yours"),
    torchrun=True,
)
