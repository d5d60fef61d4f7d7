"""`python -m cifar10 doctor`."""

import argparse

from cifar10.config import flags
from cifar10.tools.doctor.options import Options

HELP = "find out why a GPU is not found, or what else is wrong here"
DESCRIPTION = """Finds out why a GPU is not found, or what else is wrong here.

    python -m cifar10 doctor

Looks at versions, processor, memory, disk, the ports of TF_CONFIG, NVIDIA's
devices, driver and libraries, and computes a little on each device, plain and
with XLA. Problems are listed at the end, each with its fix. Exit code 0:
training can run as the machine stands, with or without a GPU; 1: something is
broken; 2: a wrong flag.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    flags.add_flags(parser, Options)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from cifar10.tools.doctor import report

    return report.run(flags.from_arguments(Options, arguments))
