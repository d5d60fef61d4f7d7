"""This package."""

import tomllib
from pathlib import Path

import cifar10
from benchmarks.promises.adapters import keras_network, protocol
from benchmarks.promises.trainers import ours


def train(job: protocol.Job) -> tuple:
    """Trains, or continues."""
    model, record = ours.train(
        job.reached,
        model=keras_network.build,
        data=job.arrays(),
        train_dir=job.folder,
        max_steps=job.steps,
        checkpoint_steps=job.save_steps,
        eval_steps=job.save_steps,
        num_gpus=job.workers,
        global_batch_size=job.batch_size,
        accumulate=job.accumulate,
        learning_rate=job.learning_rate,
        momentum=job.momentum,
        schedule="staircase" if job.constant else "cosine",
        seed=job.seed,
    )
    return model.get_weights(), record.step, record.best and record.best[1]


def evaluate(job: protocol.Job) -> tuple:
    """Scores the newest checkpoint."""
    _, scored = job.arrays()
    found = cifar10.evaluate(job.folder, data=scored, model=keras_network.build)
    return found["cross_entropy"], found["precision @ 1"]


pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
protocol.serve(
    train,
    evaluate,
    name="ours",
    version=pyproject["project"]["version"],
    checkpoint="checkpoints/*/state.data*",
    documents="runs.md",
)
