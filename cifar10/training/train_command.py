"""The command `python -m cifar10 train`, which the training scripts also run."""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from cifar10.config import flags, layout
from cifar10.config.config import Config
from cifar10.distributed import cluster, launcher
from cifar10.errors import EXIT_DIVERGED, StoppedError, UsageError, say
from cifar10.process import entry_point, signals
from cifar10.run_directory import checkpoints
from cifar10.run_directory.averages import divergence
from cifar10.training import preflight

HELP = "train on the GPUs of this machine, or on its CPU"
# What every run writes and reaches; docs/accuracy.md has the machines.
OUTCOME = """The run goes to --train_dir:

    checkpoints/     eval scores them, and the same command resumes from them
    train/           event files: tensorboard --logdir runs/cifar10_train
    metrics.jsonl    one object per logged step
    config.json      the configuration, which determines the result

On CIFAR-10, 57 % of the test images are right after 750 steps of 128 images,
70 % after 2,000, and 86 % after the default 100,000. --recipe fast reaches 93 %
in minutes on two cores, or 94 % if eval averages six views of each image
(--test_time_augmentation).
"""
DESCRIPTION = f"""Trains an image classifier on several GPUs by data parallelism.

    python -m cifar10 train --num_gpus 4

Each GPU has one tower; without a GPU, the CPU simulates the towers. Each tower
takes --batch_size images per step, so four towers take 512. For the result of a
single tower, four towers need --batch_size 32. {OUTCOME}"""
ONE_TOWER = f"""Trains an image classifier with one tower, on the first GPU or the CPU.

    python -m cifar10 train

{OUTCOME}"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    train_or_launch(flags.from_flags(parser, words))
    return 0


def train_or_launch(config: Config, *, alone: bool = False) -> None:
    """Trains in this process, or launches others for seeds, workers or restarts.

    With `alone`, trains without other workers, even if `TF_CONFIG` or SLURM names some.
    """
    processes, train_dir = config.processes, layout.absolute_path(config.run.train_dir)
    if processes.seeds:
        if not alone and cluster.from_environment():
            raise UsageError("--seeds is for one machine. On several, give one --seed.")
        launcher.train_seeds(processes.seeds, sys.argv, train_dir)
        return
    count, restarts = processes.local_workers, processes.max_restarts
    if count or restarts:
        launcher.launch(count, restarts, sys.argv, train_dir)
        return
    if alone and cluster.is_requested():
        say(
            "Note: this script trains alone, although TF_CONFIG or SLURM names other "
            "workers.\ntrain_multi_gpu.py trains with them."
        )
    alone = alone or not cluster.is_requested()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(signals.StopSignals())
        # With several workers, `train` takes the lock after they have connected.
        locked = preflight.locked_run(config, stop)
        lock = stack.enter_context(locked) if alone else None
        deterministic = config.speed.deterministic
        entry_point.import_tensorflow(deterministic=deterministic, stop=stop)
        # TensorFlow is imported only after the flags were checked.
        from cifar10.training import train

        workers = None if alone else cluster.from_environment()
        step = train.train(config, stop, workers, lock=lock)
    saved = train_dir / layout.CHECKPOINTS
    if step in checkpoints.steps(saved):  # Else another machine has the run.
        averages = checkpoints.read_manifest(saved, step).get(checkpoints.AVERAGES, {})
        if divergence(config, averages) or checkpoints.was_diverged(train_dir):
            raise StoppedError("The run has diverged.", EXIT_DIVERGED)
