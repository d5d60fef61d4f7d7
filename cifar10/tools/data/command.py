"""`python -m cifar10 data`."""

import argparse
import dataclasses
from collections.abc import Sequence

from cifar10.config import flags
from cifar10.config.config import Config
from cifar10.config.data_flag import TFDS
from cifar10.config.options import check, names, option
from cifar10.process import entry_point

HELP = "prepare your pictures, and show what is in them"
DESCRIPTION = """Prepares pictures as a training would, and shows what is in them.

    python -m cifar10 data photos
    python -m cifar10 data photos --image_size 128 --contact_sheet photos.png

Says how many pictures each class has to train and to test on, how large they
are, which were left out and why, and which are the same to the last pixel: one
that is tested and trained on makes scores too good, one in two classes cannot
be learned. It draws some of each class on a sheet, and names the command that
trains on them, with --max_bad_images where a training would refuse so many that
were left out. The training finds the pictures prepared if its flags are the
same. Exit code 0: shown; 2: a mistake that you can fix.
"""

_PREPARATION = {"image_size", "validation_fraction", "max_bad_images", "data_dir"}


@dataclasses.dataclass(frozen=True)
class Options:
    """How to show a data set; see each field's help."""

    contact_sheet: str | None = option(
        None, "PNG of some pictures of each class (default: one in the cache)"
    )
    json: bool = option(False, "print all that was found as JSON")

    def __post_init__(self) -> None:
        check(self)


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    what = "as --data of a training: a folder, an .npz, tfds:NAME, cifar10, ..."
    parser.add_argument("data", metavar="PATH", help=what)
    flags.add_flags(parser, Options)
    flags.add_flags(parser, Config, leave_out=names(Config) - _PREPARATION)
    given = flags.parse(parser, words)
    options = Options(**{name: given.pop(name) for name in names(Options) & {*given}})
    config = flags.with_recipe(given)
    if given["data"].startswith(TFDS):
        entry_point.import_tensorflow()
    from cifar10.tools.data import findings

    findings.show(config, given, options.contact_sheet, as_json=options.json)
    return 0
