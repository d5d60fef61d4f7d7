"""Trains an image classifier on several GPUs: python train_multi_gpu.py --help."""

import argparse
import sys

from cifar10.config import flags
from cifar10.process import entry_point
from cifar10.tools.doctor import explain_missing_gpus
from cifar10.training import train_command


def main() -> None:
    """Parses the flags and trains."""
    parser = argparse.ArgumentParser(**flags.described(train_command.DESCRIPTION))
    train_command.main(parser, sys.argv[1:])


if __name__ == "__main__":
    entry_point.run_program(
        main, explain_missing_gpus=explain_missing_gpus, output_is_log=True
    )
