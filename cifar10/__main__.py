"""The command line of the package.

    python -m cifar10 train --num_gpus 4
    python -m cifar10 eval
    python -m cifar10 doctor
    python -m cifar10 data photos
    python -m cifar10 plan --model resnet --batch_size 4096
    python -m cifar10 export --output /tmp/cifar10_model
    python -m cifar10 report --train_dir runs/cifar10_train
    python -m cifar10 predict cat.png
    python -m cifar10 serve
    python -m cifar10 runs
    python -m cifar10 replay runs/cifar10_train --steps 101:200
    python -m cifar10 audit runs/cifar10_train

COMMAND --help describes a command and lists its flags.
"""

import argparse
import io
import sys
from typing import Any

from cifar10.config import flags
from cifar10.errors import EXIT_USAGE, did_you_mean
from cifar10.evaluation import eval_command
from cifar10.process import entry_point, invocation
from cifar10.tools import (
    audit,
    data,
    doctor,
    export,
    plan,
    predict,
    replay,
    report,
    runs,
    serve,
)
from cifar10.training import train_command

# Each module has HELP, DESCRIPTION and `main(parser, words)`. `main` adds the command's
# flags to the parser, parses the words and returns the exit code. The modules must not
# import TensorFlow before `main` runs.
_COMMANDS = {
    "train": train_command,
    "eval": eval_command,
    "doctor": doctor,
    "data": data,
    "plan": plan,
    "predict": predict,
    "serve": serve,
    "export": export,
    "report": report,
    "runs": runs,
    "replay": replay,
    "audit": audit,
}


def run() -> None:
    """Runs the program `cifar10`, or `python -m cifar10`, and exits."""
    is_training = sys.argv[1:2] == ["train"]
    entry_point.run_program(
        main,
        explain_missing_gpus=doctor.explain_missing_gpus,
        output_is_log=is_training,
    )


def main() -> None:
    """Runs the command named on the command line, then exits with its exit code."""
    parser = argparse.ArgumentParser(
        prog=invocation.program_name(), **flags.described(__doc__)
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and exit"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    parsers = {
        name: subparsers.add_parser(
            name, help=command.HELP, **flags.described(command.DESCRIPTION)
        )
        for name, command in _COMMANDS.items()
    }
    first, *words = sys.argv[1:] or ["-"]
    if first in _COMMANDS:
        if isinstance(sys.stdin, io.TextIOWrapper):  # For file names not in UTF-8.
            sys.stdin.reconfigure(errors="surrogateescape")
        sys.exit(_COMMANDS[first].main(parsers[first], words))
    if not first.startswith("-"):
        meant = did_you_mean(first, _COMMANDS)
        listed = f"The commands are {', '.join(_COMMANDS)}."
        parser.error(f"{first}: there is no such command.{meant} {listed}")
    flags.parse(parser, sys.argv[1:])  # Shows the help or the version.
    parser.print_help(sys.stderr)
    sys.exit(EXIT_USAGE)


class _Version(argparse.Action):
    """Prints the version, computed from the source files on demand, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{invocation.DISTRIBUTION} {invocation.package_version()}")
        parser.exit()


if __name__ == "__main__":
    run()
