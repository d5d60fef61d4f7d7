"""`python -m cifar10 report`."""

from __future__ import annotations

import argparse
import functools
import io
import sys

from cifar10.config import cli

HELP = "write one page on one or several runs: curves, mistakes, checkpoints"
DESCRIPTION = """Writes one page on one or several runs.

    python -m cifar10 report /tmp/cifar10_train
    python -m cifar10 report /tmp/one /tmp/another --output both.html

The page shows what ran on what and where the runs differ, curves of loss, accuracy,
throughput and learning rate, the confusion matrix and the hardest images of the newest
intact checkpoint, and all checkpoints. It is one HTML file, without scripts, and needs
nothing else. It is scored as eval.py scores, on the test set; what a run lacks, the
page says. An earlier report is replaced, another file is not. Needs the packages of the
extra `report`.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    flag = parser.add_argument
    switch = functools.partial(flag, action=argparse.BooleanOptionalAction)
    flag("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run")
    flag("--output", default="report.html", help="the page")
    switch("--evaluate", default=True, help="score the newest intact checkpoints")
    # Where it is not given, `reporter.Options` knows what to take.
    optional = functools.partial(flag, default=argparse.SUPPRESS)
    optional("--data_dir", help="directory of the data set (default: the runs')")
    flag("--device", default="auto", help="device to use: auto, cpu, gpu or gpu:NUMBER")
    switch("--verbose", default=False, help="show TensorFlow's own start-up messages")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    flags = {name: value for name, value in vars(arguments).items() if name != "run"}
    flags["run_dirs"] = tuple(flags["run_dirs"])
    if isinstance(sys.stdout, io.TextIOWrapper):  # Names of files need not be text.
        sys.stdout.reconfigure(errors="backslashreplace")
    cli.import_tensorflow(verbose=flags.pop("verbose"))
    from cifar10.tools.report import reporter

    reporter.run(reporter.Options(**flags))
    return 0
