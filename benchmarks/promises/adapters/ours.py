"""This package, as README.md recommends, deterministic."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import protocol

_ROOT = Path(__file__).parents[3]
# The package need not be installed.
sys.path.insert(0, str(_ROOT))

from cifar10 import Config, evaluate, train  # noqa: E402


def network(image_shape: tuple[int, ...], classes: int) -> Any:
    """Returns the network that all adapters train."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(classes, kernel_initializer="zeros"),
        ]
    )


class Watch:
    """Tells the protocol each step, and keeps the variables."""

    def __init__(self, job: protocol.Job) -> None:
        self._job = job

    def on_start(self, run: Any) -> None:
        """Takes the model."""
        self.model = run.state.model

    def on_log(self, step: int, metrics: Any) -> None:
        """Notes a step."""
        protocol.reached(self._job, step, metrics["learning_rate"])


def run(job: protocol.Job) -> None:
    """Trains, or continues."""
    x, y, x_test, y_test = job.arrays()
    watch = Watch(job)
    config = Config(
        model=network,
        data=((x, y), (x_test, y_test)),
        distortions="none",
        num_gpus=job.workers,
        accumulate=job.accumulate,
        global_batch_size=job.batch_size,
        max_steps=job.steps,
        checkpoint_steps=job.save_steps,
        eval_steps=job.save_steps,
        best_by="cross_entropy",
        momentum=job.momentum,
        learning_rate=job.learning_rate,
        schedule="staircase" if job.constant else "cosine",
        moving_average_decay=0.0,
        precision="float32",
        deterministic=True,
        log_frequency=1,
        seed=job.seed,
        train_dir=job.folder,
    )
    record = train(config, hooks=[watch])
    best = record.best
    protocol.answer(
        job,
        [variable.numpy() for variable in watch.model.variables],
        step=record.step,
        best=best and best[1],
    )


def main() -> None:
    """Does the job."""
    job = protocol.read_job()
    if job.task == "describe":
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
        protocol.describe(
            job,
            "ours",
            project["version"],
            "checkpoints/*/state.data*",
            "runs.md",
        )
    elif job.task == "evaluate":
        *_, x, y = job.arrays()
        found = evaluate(job.folder, data=(x, y), model=network)
        protocol.answer(
            job, loss=found["cross_entropy"], accuracy=found["precision @ 1"]
        )
    else:
        run(job)


if __name__ == "__main__":
    main()
