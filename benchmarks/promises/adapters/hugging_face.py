"""Hugging Face's Trainer."""

import torch
import transformers

from benchmarks.promises.adapters import protocol, torch_network
from benchmarks.promises.trainers import hugging_face


def build(job: protocol.Job) -> transformers.Trainer:
    """Returns the Trainer, which makes its own schedule."""
    network = torch_network.build(job)
    return hugging_face.build(
        network,
        torch.optim.SGD(network.parameters(), job.learning_rate, job.momentum),
        *torch_network.data(job),
        job.folder,
        save_steps=job.save_steps,
        batch_size=job.worker_batch_size,
        on_update=job.reached,
        max_steps=job.steps,
        gradient_accumulation_steps=job.accumulate,
        lr_scheduler_type="constant" if job.constant else "cosine",
        seed=job.seed,
    )


def train(job: protocol.Job) -> tuple:
    """Trains, or continues."""
    trainer = build(job)
    trainer.train(resume_from_checkpoint=job.resume)
    state = trainer.state
    return torch_network.weights(trainer.model), state.global_step, state.best_metric


def evaluate(job: protocol.Job) -> tuple:
    """Scores the newest weights."""
    return hugging_face.evaluate(build(job))


protocol.serve(
    train,
    evaluate,
    name="Hugging Face Trainer",
    version=transformers.__version__,
    checkpoint="checkpoint-*/model.safetensors",
    documents="https://huggingface.co/docs/transformers/main_classes/trainer",
    torchrun=True,
)
