"""`python -m cifar10 doctor`."""

import argparse
from collections.abc import Sequence

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


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    flags.add_flags(parser, Options)
    from cifar10.tools.doctor import report

    return report.run(Options(**flags.parse(parser, words)))
