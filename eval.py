"""Scores the checkpoints of train.py and train_multi_gpu.py.

    python eval.py --run_once

Prints `precision @ 1` and tables, and writes event files, whose curves lie over
the training's in TensorBoard, and a line of JSON to eval/metrics.jsonl. Without
--run_once it follows a running training until its end, scoring each newest
checkpoint once and printing a line for each; these scores tell the training
which checkpoints --keep_best keeps. Checkpoints that the training scores itself
(--eval_steps) are skipped. The run's directory names the model and the data
set; a model of your own is looked for in the current folder.
"""

import argparse
import sys

from cifar10.config import flags
from cifar10.evaluation import eval_command
from cifar10.process import entry_point
from cifar10.tools.doctor import explain_missing_gpus


def main() -> None:
    """Parses the flags and scores."""
    parser = argparse.ArgumentParser(**flags.described(__doc__))
    eval_command.main(parser, sys.argv[1:])


if __name__ == "__main__":
    entry_point.run_program(main, explain_missing_gpus=explain_missing_gpus)
