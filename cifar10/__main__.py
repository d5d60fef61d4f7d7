"""The command line of the package.

    python -m cifar10 train --num_gpus 4
    python -m cifar10 eval

COMMAND --help describes a command and lists its flags.
"""

import argparse
import sys
from importlib import import_module

from cifar10.config import flags
from cifar10.evaluation import eval_command
from cifar10.process import entry_point, invocation
from cifar10.tools import doctor
from cifar10.training import train_command

# Each module has HELP, DESCRIPTION and `main(parser, words)`. `main` adds the command's
# flags to the parser, parses the words and returns the exit code. The modules must not
# import TensorFlow before `main` runs.
_TOOLS = (
    *("doctor", "data", "plan", "predict", "serve", "export", "report", "runs"),
    *("replay", "audit", "whatif"),
)
_COMMANDS = {"train": train_command, "eval": eval_command} | {
    name: import_module(f"cifar10.tools.{name}") for name in _TOOLS
}


def run() -> None:
    """Runs the program `cifar10`, or `python -m cifar10`, and exits."""
    entry_point.run_program(
        main,
        explain_missing_gpus=doctor.explain_missing_gpus,
        output_is_log=sys.argv[1:2] == ["train"],
    )


def main() -> None:
    """Runs the command named on the command line, then exits with its exit code."""
    details = flags.described(__doc__)
    parser = argparse.ArgumentParser(prog=invocation.program_name(), **details)
    version = f"{invocation.DISTRIBUTION} {invocation.package_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers = {}
    for name, command in _COMMANDS.items():
        details = flags.described(command.DESCRIPTION)
        parsers[name] = commands.add_parser(name, help=command.HELP, **details)
    # May show the help or the version.
    parser.parse_args(sys.argv[1:2] or ["--help"])
    name, *words = sys.argv[1:]
    sys.exit(_COMMANDS[name].main(parsers[name], words))


if __name__ == "__main__":
    run()
