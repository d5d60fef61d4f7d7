"""Trains on two workers of Ray, which starts all again when it loses one.

    python examples/06_ray.py [STEPS]

On a cluster, `runs` and the data have to be in folders that all machines share.
"""

import os
import secrets
import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.tensorflow import TensorflowTrainer


def work(settings):
    from cifar10 import Config, train

    record = train(Config(**settings))
    # Ray waits for a report of each worker.
    report({"step": record.step, **record.metrics})


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000
    runs = Path("runs").absolute()  # Workers start in another folder.
    settings = {
        "max_steps": steps,
        "checkpoint_steps": max(1, steps // 10),
        "train_dir": str(runs / "ray"),
        "data_dir": os.environ.get("CIFAR10_DATA_DIR") or None,
        "deterministic": True,  # What is lost is computed again, bit for bit.
    }
    # Ray imports TensorFlow in its workers, before `train` could set this up.
    environment = {
        "CIFAR10_WORKER_SECRET": secrets.token_hex(32),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    trainer = TensorflowTrainer(
        work,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(runs / "of_ray"),
            failure_config=FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": environment},
        ),
    )
    trainer.fit()
    print(f"done: the run is in {settings['train_dir']}")


if __name__ == "__main__":
    main()
