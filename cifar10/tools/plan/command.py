"""`python -m cifar10 plan`."""

import argparse
from collections.abc import Sequence

from cifar10.config import fields, flags
from cifar10.config.config import Config
from cifar10.config.options import names
from cifar10.models import names as names_of_models
from cifar10.process import entry_point
from cifar10.tools.plan.options import Options

HELP = "say how much memory a step takes, and how many sections fit"
DESCRIPTION = """Says how much memory a step takes, plain and in sections.

    python -m cifar10 plan --model resnet --batch_size 4096 --num_gpus 4
    python -m cifar10 plan --model resnet --find_batch

Traces the step without computing it, so it needs neither its memory nor data.
On CPUs the figures are within 20 % of what a step takes; a GPU's kernels take
memory of their own, which is not known here. Without a GPU, what one tower's
step takes is what its GPU would have to hold beside the variables. It says
which --sections fit into --memory_limit, or into 85 % of what is free; exit
code 1 if none does. With --find_batch it says which --batch_size is the largest
that fits there, and on GPUs tries a step of it in a process of its own.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    parser.usage = "%(prog)s [FLAGS]"  # Their choices alone would fill it.
    others = names(fields.ALL, affects_memory=False)
    flags.add_flags(parser, Options)
    flags.add_flags(parser, fields.ALL, leave_out=others)
    given = flags.parse(parser, words)
    options = Options(**{name: given.pop(name) for name in names(Options) & {*given}})
    config = Config(**given)
    names_of_models.check(config.network.model)
    options.check_with(config, given)
    entry_point.import_tensorflow()
    from cifar10.tools.plan import plan as memory_report

    if options.find_batch:
        text, fits = memory_report.report_largest_batch(
            config, given, as_json=options.json
        )
    else:
        text, fits = memory_report.report(config, as_json=options.json)
    print(text)
    return 0 if fits else 1
