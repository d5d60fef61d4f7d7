"""Scores the checkpoints of a run: python eval.py --help."""

import argparse
import sys

from cifar10.config import flags
from cifar10.evaluation import eval_command
from cifar10.process import entry_point
from cifar10.tools.doctor import explain_missing_gpus


def main() -> None:
    """Parses the flags and scores."""
    parser = argparse.ArgumentParser(**flags.described(eval_command.DESCRIPTION))
    eval_command.main(parser, sys.argv[1:])


if __name__ == "__main__":
    entry_point.run_program(main, explain_missing_gpus=explain_missing_gpus)
