"""`python -m cifar10 eval`."""

import argparse

from cifar10.config import flags
from cifar10.evaluation.options import Options
from cifar10.process import entry_point
from cifar10.run_directory import restoring

HELP = "score checkpoints, once or as they appear"
DESCRIPTION = """Scores the checkpoints of a run, as the script eval.py does.

    python -m cifar10 eval --run_once

Prints `precision @ 1` and tables, and writes event files that lie over the
training's in TensorBoard and a line of JSON to eval/metrics.jsonl. Without
--run_once or --step it follows a running training until its end, scoring each
newest checkpoint once and printing a line for each; these scores tell the
training which checkpoints --keep_best keeps. Checkpoints that the training
scores itself (--eval_steps) are skipped. The run's directory names the model
and the data set; a model of your own is looked for in the current folder.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.usage = "%(prog)s [FLAGS]"  # All of them are too wide for a terminal.
    flags.add_flags(parser, Options)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    options = flags.from_arguments(Options, arguments)
    if options.once:
        restoring.check(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    from cifar10.evaluation import evaluate

    evaluate.run(options)
    return 0
