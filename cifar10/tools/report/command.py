"""`python -m cifar10 report`."""

import argparse
from collections.abc import Sequence

from cifar10.config import flags
from cifar10.process import entry_point
from cifar10.tools.report.options import Options

HELP = "write one page on one or several runs: curves, mistakes, checkpoints"
DESCRIPTION = """Writes one page on one or several runs.

    python -m cifar10 report --train_dir runs/cifar10_train
    python -m cifar10 report runs/one runs/another --output both.html

The page shows what ran on what and where the runs differ, curves of loss,
accuracy, throughput and learning rate, the confusion matrix and the hardest
images of a checkpoint (the newest, or --step), and all checkpoints. It is one
HTML file, without scripts, and needs nothing else. It is scored as eval.py
scores, on the test set; what a run lacks, the page says. An earlier report is
replaced, another file is not. Needs the packages of the extra `report`.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    parser.add_argument(
        "run_dirs", nargs="*", metavar="RUN_DIR", help="directory of a run"
    )
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    entry_point.import_tensorflow()
    from cifar10.tools.report import reporter

    reporter.run(options)
    return 0
