"""`python -m cifar10 doctor`."""

from __future__ import annotations

import argparse
import functools
import os

from cifar10.config import config
from cifar10.errors import UsageError

HELP = "find out why a GPU is not found, or what else is wrong here"
DESCRIPTION = """Finds out why a GPU is not found, or what else is wrong here.

    python -m cifar10 doctor

Looks at versions, processor, memory, disk, the ports of TF_CONFIG, NVIDIA's devices,
driver and libraries, and computes a little on each device, plain and with XLA. What is
wrong is said at the end with what to do. Exit code 0: training can run as the machine
stands, with or without a GPU; 1: something is broken; 2: a wrong flag.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    flag = parser.add_argument
    switch = functools.partial(flag, action=argparse.BooleanOptionalAction)
    flag("--train_dir", default=config.TRAIN_DIR, help="directory of runs")
    data_dir = os.environ.get("CIFAR10_DATA_DIR") or "~/.cache/cifar10"
    flag("--data_dir", default=data_dir, help="directory of the data set")
    switch("--compute", default=True, help="compute a little on each device")
    limit = "seconds that each computation may take; a new GPU compiles for minutes"
    flag("--seconds", type=float, default=120.0, help=limit)
    switch("--json", default=False, help="print all that was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from cifar10.tools.doctor import report

    if not 0 < arguments.seconds <= 86_400:
        raise UsageError(
            f"--seconds {arguments.seconds:g}: it is more than 0 and at most 86400."
        )
    folders = {"runs": arguments.train_dir, "the data set": arguments.data_dir}
    return report.run(
        folders,
        seconds=arguments.seconds,
        compute=arguments.compute,
        as_json=arguments.json,
    )
