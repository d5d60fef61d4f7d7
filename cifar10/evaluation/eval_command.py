"""The command `python -m cifar10 eval`, which is also the script eval.py."""

import argparse
from collections.abc import Sequence

from cifar10.config import flags
from cifar10.evaluation.eval_options import Options
from cifar10.process import entry_point
from cifar10.run_directory import restoring

HELP = "score checkpoints, once or as they appear"
DESCRIPTION = """Scores the checkpoints of a run.

    python -m cifar10 eval --run_once

Prints the accuracy (`precision @ 1`) with its 95 % confidence interval, and
tables. Appends the scores to eval/metrics.jsonl and to TensorBoard's curves.

Without --run_once or --step, the command follows a run until training ends, and
scores each new checkpoint, even if the run has scored it (--eval_steps). These
scores, too, decide which checkpoints --keep_best keeps. The run's directory names
the model and the data set; your own model is imported from the current folder.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns the exit code."""
    parser.usage = "%(prog)s [FLAGS]"  # A list of all flags is too long.
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    if options.once:
        restoring.check_usable(options.train_dir, options.trust_model, options.step)
    entry_point.import_tensorflow()
    from cifar10.evaluation.evaluate import Evaluator

    evaluator = Evaluator(options)
    for step in evaluator.follow(options.eval_interval_secs, once=options.once):
        evaluator.score(step)
    return 0
