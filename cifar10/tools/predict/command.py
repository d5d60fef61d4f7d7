"""`python -m cifar10 predict`."""

from __future__ import annotations

import argparse
import functools

from cifar10.config import cli, config

HELP = "say what is on images"
DESCRIPTION = """Says what is on images: the likeliest classes and their probabilities.

    python -m cifar10 predict cat.png holiday/ --train_dir /tmp/cifar10_train
    find . -name '*.jpg' | python -m cifar10 predict - --json

PNG and JPEG files, up to 50 megapixels and 50 MB, are prepared as the images of an
evaluation are. With --follow it predicts again at each new checkpoint, until the
training has finished. Exit code 0: all were predicted; 1: some were skipped, named on
stderr; 2: something you can mend.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    flag = parser.add_argument
    switch = functools.partial(flag, action=argparse.BooleanOptionalAction)
    images = "PNG or JPEG files; folders of such; - for a list on standard input"
    flag("images", nargs="+", metavar="IMAGE", help=images)
    flag("--train_dir", default=config.TRAIN_DIR, help="directory of the run")
    switch("--follow", default=False, help="predict again at each new checkpoint")
    looks = "seconds between two looks for a new checkpoint"
    flag("--interval_secs", type=float, default=5.0, help=looks)
    flag("--top_k", type=int, default=3, help="how many classes to name")
    averages = "use the variables' moving averages, not their last values"
    switch("--use_averages", default=True, help=averages)
    flag("--device", default="auto", help="device to use: auto, cpu, gpu or gpu:NUMBER")
    switch("--json", default=False, help="print JSON, one object per image")
    switch("--verbose", default=False, help="show TensorFlow's own start-up messages")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    flags = vars(arguments)
    cli.import_tensorflow(verbose=flags["verbose"])
    from cifar10.tools.predict import predicting

    flags["as_json"] = flags["json"]
    for name in ("json", "run", "verbose"):
        del flags[name]
    return predicting.run(predicting.Options(**flags))
