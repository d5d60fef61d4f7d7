"""Trains an image classifier with one tower: python train.py --help."""

import argparse

from cifar10.config import flags
from cifar10.process import entry_point
from cifar10.tools.doctor import explain_missing_gpus
from cifar10.training import train_command


def main() -> None:
    """Parses the flags and trains."""
    parser = argparse.ArgumentParser(**flags.described(train_command.ONE_TOWER))
    config = flags.from_flags(
        parser,
        num_gpus=1,
        split_gpu=1,
        local_workers=None,
        variable_update="towers",
        worker_timeout=300.0,
    )
    train_command.train_or_launch(config, alone=True)


if __name__ == "__main__":
    entry_point.run_program(
        main, explain_missing_gpus=explain_missing_gpus, output_is_log=True
    )
