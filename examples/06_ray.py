"""Trains on two workers of Ray, which restarts all when one is lost.

    python examples/06_ray.py [STEPS]

On a cluster, all machines must share the folders of `runs` and the data.
"""

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.tensorflow import TensorflowTrainer


def work(settings):
    from cifar10 import Config, train

    report(train(Config(**settings)).metrics)  # Ray waits for each worker's report.


if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000
    runs = Path("runs").absolute()  # Workers start in another folder.
    TensorflowTrainer(
        work,
        train_loop_config={
            "max_steps": steps,
            "checkpoint_steps": max(1, steps // 10),
            "train_dir": str(runs / "ray"),
        },
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(runs / "of_ray"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
