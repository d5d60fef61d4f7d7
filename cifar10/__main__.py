"""The commands beside training and evaluation.

    python -m cifar10 doctor
    python -m cifar10 data photos
    python -m cifar10 plan --model resnet --batch_size 4096
    python -m cifar10 export --output /tmp/cifar10_model
    python -m cifar10 report --train_dir runs/cifar10_train
    python -m cifar10 predict cat.png
    python -m cifar10 serve

COMMAND --help says what it does.
"""

import argparse
import io
import sys

from cifar10.config import cli
from cifar10.errors import EXIT_USAGE
from cifar10.tools.data import command as data
from cifar10.tools.doctor import command as doctor
from cifar10.tools.doctor.report import explain_missing_gpus
from cifar10.tools.export import command as export
from cifar10.tools.plan import command as plan
from cifar10.tools.predict import command as predict
from cifar10.tools.report import command as report
from cifar10.tools.serve import command as serve

_COMMANDS = (doctor, data, plan, predict, serve, export, report)


def main() -> None:
    """Parses the command line and runs the command that it names."""
    parser = argparse.ArgumentParser(
        prog=cli.program_name(),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        subparser = commands.add_parser(
            command.__name__.split(".")[-2],
            help=command.HELP,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_flags(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args()
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        sys.exit(EXIT_USAGE)
    if isinstance(sys.stdin, io.TextIOWrapper):  # Names of files need not be text.
        sys.stdin.reconfigure(errors="surrogateescape")
    sys.exit(arguments.run(arguments))


if __name__ == "__main__":
    cli.run(main, explain_missing_gpus=explain_missing_gpus)
