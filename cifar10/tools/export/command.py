"""`python -m cifar10 export`."""

from __future__ import annotations

import argparse
import functools
import io
import sys

from cifar10.config import cli, config

HELP = "write the model of a run as a SavedModel or as ONNX"
DESCRIPTION = """Writes the model of a run as a SavedModel or as ONNX.

    python -m cifar10 export --format savedmodel --output /tmp/cifar10_model
    python -m cifar10 export --format onnx --output /tmp/cifar10_model.onnx

The model takes images as evaluation prepares them and returns logits, both float32,
whatever precision the run was trained in. The result is loaded in a process of its own
and has to compute the same on 256 test images, or nothing is left of it. What the model
is (distortions, image shape, class names, step) is in a SavedModel's cifar10.json and
in the metadata of ONNX. Exit code 0: written and checked; 1: it computes otherwise; 2:
something that you can mend. ONNX needs the packages of the extra `export`.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    flag = parser.add_argument
    switch = functools.partial(flag, action=argparse.BooleanOptionalAction)
    # Where it is not given, `exporter.Options` knows what to take.
    optional = functools.partial(flag, default=argparse.SUPPRESS)
    flag("--train_dir", default=config.TRAIN_DIR, help="directory of the run")
    choices = ("savedmodel", "onnx")
    flag("--format", choices=choices, default="savedmodel", help="what to write")
    required = functools.partial(flag, required=True, default=argparse.SUPPRESS)
    required("--output", help="folder (savedmodel) or file (onnx) to make")
    optional("--step", type=int, help="step of the checkpoint (default: the newest)")
    averages = "take the variables' moving averages, not their last values"
    switch("--use_averages", default=True, help=averages)
    optional("--data_dir", help="directory of the data set (default: the run's)")
    switch("--verbose", default=False, help="show TensorFlow's own start-up messages")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    flags = {name: value for name, value in vars(arguments).items() if name != "run"}
    if isinstance(sys.stdout, io.TextIOWrapper):  # Names of files need not be text.
        sys.stdout.reconfigure(errors="backslashreplace")
    cli.import_tensorflow(verbose=flags.pop("verbose"))
    from cifar10.tools.export import exporter

    return exporter.run(exporter.Options(**flags))
