"""Everything that the package does, in one command.

    python -m cifar10 train --num_gpus 4
    python -m cifar10 eval
    python -m cifar10 doctor
    python -m cifar10 data photos
    python -m cifar10 find-rate --optimizer adam --momentum 0
    python -m cifar10 plan --model resnet --batch_size 4096
    python -m cifar10 export --output /tmp/cifar10_model
    python -m cifar10 report --train_dir runs/cifar10_train
    python -m cifar10 predict cat.png
    python -m cifar10 serve

COMMAND --help explains a command.
"""

import argparse
import io
import sys
from typing import Any

from cifar10.config import flags
from cifar10.errors import EXIT_USAGE, did_you_mean
from cifar10.process import entry_point, invocation
from cifar10.tools.data import command as data
from cifar10.tools.doctor import command as doctor
from cifar10.tools.doctor.report import explain_missing_gpus
from cifar10.tools.eval import command as evaluation
from cifar10.tools.export import command as export
from cifar10.tools.find_rate import command as find_rate
from cifar10.tools.plan import command as plan
from cifar10.tools.predict import command as predict
from cifar10.tools.report import command as report
from cifar10.tools.serve import command as serve
from cifar10.tools.train import command as training

_COMMANDS = (
    *(evaluation, doctor, data, find_rate, plan, predict, serve, export, report),
)


def run() -> None:
    """Runs `cifar10` or `python -m cifar10`, and ends with its exit code."""
    is_training = sys.argv[1:2] == ["train"]
    entry_point.run(
        main, explain_missing_gpus=explain_missing_gpus, output_is_log=is_training
    )


def main() -> None:
    """Parses the command line and runs the command that it names."""
    parser = argparse.ArgumentParser(prog=invocation.name(), **flags.described(__doc__))
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and end"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    trainer = commands.add_parser(
        "train", help=training.HELP, **flags.described(training.DESCRIPTION)
    )
    if sys.argv[1:2] == ["train"]:  # It parses its flags itself, as the scripts.
        training.main(trainer, sys.argv[2:])
        return
    for command in _COMMANDS:
        subparser = commands.add_parser(
            command.__name__.split(".")[-2].replace("_", "-"),
            help=command.HELP,
            **flags.described(command.DESCRIPTION),
        )
        command.add_flags(subparser)
        subparser.set_defaults(run=command.run)
    first = next(iter(sys.argv[1:]), "-")
    if not first.startswith("-") and first not in commands.choices:
        meant = did_you_mean(first, commands.choices)
        listed = f"It is one of {', '.join(commands.choices)}."
        parser.error(f"{first}: there is no such command.{meant} {listed}")
    arguments, unknown = parser.parse_known_args()
    flags.refuse_unknown(commands.choices.get(first, parser), unknown)
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        sys.exit(EXIT_USAGE)
    if isinstance(sys.stdin, io.TextIOWrapper):  # Names of files need not be text.
        sys.stdin.reconfigure(errors="surrogateescape")
    sys.exit(arguments.run(arguments))


class _Version(argparse.Action):
    """Prints the version, which takes reading the sources, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{invocation.DISTRIBUTION} {invocation.version()}")
        parser.exit()


if __name__ == "__main__":
    run()
