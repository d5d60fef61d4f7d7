"""Lightning's Trainer; `python lightning_trainer.py [within] JOB.json`.

Saves at ends of epochs and tests on one device, as warnings advise. With `within`, it
saves within epochs and tests on all devices.
"""

import sys

import lightning

from benchmarks.promises.adapters import protocol, torch_network
from benchmarks.promises.trainers import lightning_trainer

WITHIN = "within" in sys.argv


def build(job: protocol.Job) -> lightning_trainer.Module:
    """Returns the network with its optimizer."""
    lightning.seed_everything(job.seed, workers=True)
    network = torch_network.build(job)
    return lightning_trainer.Module(network, *torch_network.optimizer(job, network))


def train(job: protocol.Job) -> tuple:
    """Trains, or continues."""
    module = build(job)
    step, best = lightning_trainer.train(
        module,
        *torch_network.data(job),
        job.folder,
        resume=job.resume,
        save_steps=job.save_steps if WITHIN else None,
        on_update=job.reached,
        batch_size=job.worker_batch_size,
        devices=job.workers,
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulate,
    )
    return torch_network.weights(module), step, best


def evaluate(job: protocol.Job) -> tuple:
    """Scores the newest weights."""
    _, scored = torch_network.data(job)
    devices = job.workers if WITHIN else 1
    return lightning_trainer.evaluate(
        build(job), scored, job.folder, job.worker_batch_size, devices
    )


protocol.serve(
    train,
    evaluate,
    name=f"Lightning{', saved within epochs' if WITHIN else ''}",
    version=lightning.__version__,
    checkpoint="last.ckpt",
    documents="https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html",
)
