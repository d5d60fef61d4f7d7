"""`python -m cifar10 find-rate`."""

import argparse

from cifar10.config import flags
from cifar10.config.config import Config
from cifar10.config.options import names
from cifar10.models import names as names_of_models
from cifar10.process import entry_point
from cifar10.tools.find_rate.options import Options

HELP = "find learning rates to try, by a short training whose rate rises"
DESCRIPTION = """Finds learning rates to try, by a short training whose rate rises.

    python -m cifar10 find-rate --optimizer adam --momentum 0
    python -m cifar10 find-rate --data photos --model resnet --steps 500

Trains with the flags of your training, but with a learning rate that rises
from step to step, until the loss explodes. It prints losses and two
suggestions: the rate at which the loss falls fastest, and a tenth of that at
which it is lowest. It draws the losses, for which it needs the packages of the
extra `report`, and leaves no run behind. Exit code 0: there are suggestions; 1:
the loss has not fallen; 2: a mistake that you can fix.
"""

# What a step depends on besides its memory.
_FURTHER = (
    *("data_dir", "data_url", "validation_fraction", "max_bad_images"),
    *("label_smoothing", "seed", "input_device"),
)
_KNOWN = names(Config, affects_memory=True) | set(_FURTHER)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags: those that a training's step depends on, and more."""
    parser.usage = "%(prog)s [FLAGS]"  # Their choices alone would fill it.
    flags.add_flags(parser, Options)
    flags.add_flags(parser, Config, leave_out=names(Config) - _KNOWN)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    options = flags.from_arguments(Options, arguments)
    given = {key: value for key, value in vars(arguments).items() if key in _KNOWN}
    config = flags.with_recipe(given)
    names_of_models.check(config.model)
    entry_point.import_tensorflow()
    from cifar10.tools.find_rate import finding

    return 0 if finding.run(config, options, given) else 1
