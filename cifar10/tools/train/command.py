"""`python -m cifar10 train`."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence

from cifar10.config import cli, flags, paths, signals
from cifar10.distributed import cluster, launcher
from cifar10.training import early

HELP = "train on the GPUs of this machine, or on its CPU"
DESCRIPTION = """Trains as the script train_multi_gpu.py does.

    python -m cifar10 train --num_gpus 4

One tower per GPU; without a GPU the towers are simulated on the CPU. Each takes
--batch_size images a step, so four towers train on 512 at once; to train what
one tower trains, say --batch_size 32. The run goes to --train_dir:

    checkpoints/     what eval scores, and what the same command goes on from
    train/           event files: tensorboard --logdir runs/cifar10_train
    metrics.jsonl    one object per logged step
    config.json      what determines the result
"""


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Parses the flags in `arguments` and trains."""
    began = time.perf_counter()
    config = flags.from_flags(parser, arguments)
    if config.local_workers or config.max_restarts:
        train_dir = paths.locate_run(config.train_dir)
        launcher.launch(config.local_workers, config.max_restarts, sys.argv, train_dir)
        return
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(signals.StopSignals())
        held = None
        if not cluster.is_requested():  # One of several workers waits for the others.
            held = stack.enter_context(early.claimed(config, stop))
        cli.import_tensorflow(deterministic=config.deterministic, stop=stop)
        from cifar10.training import train

        workers = cluster.from_environment()
        train.train(config, stop, workers, held=held, began=began)
