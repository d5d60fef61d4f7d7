"""`python -m cifar10 predict`."""

import argparse
from collections.abc import Sequence

from cifar10.config import flags
from cifar10.process import entry_point
from cifar10.run_directory import restoring
from cifar10.tools.predict.options import Options

HELP = "say what is on images"
DESCRIPTION = """Says what is on images: the likeliest classes and their probabilities.

    python -m cifar10 predict cat.png holiday/ --train_dir runs/cifar10_train
    find . -name '*.jpg' | python -m cifar10 predict - --json

PNG, JPEG, WebP, BMP, GIF and TIFF files, up to 50 megapixels and 50 MB, are
prepared as the images of an evaluation are. With --follow it predicts again at
each new checkpoint, until the training has finished. Exit code 0: all were
predicted; 1: some were skipped, named on stderr; 2: a mistake that you can fix.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    images = "files of images; folders of such; - for a list on standard input"
    parser.add_argument("images", nargs="+", metavar="IMAGE", help=images)
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    if not options.follow:
        restoring.check(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    from cifar10.tools.predict import predicting

    return predicting.run(options)
