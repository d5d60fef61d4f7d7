"""`python -m cifar10 report`."""

import argparse
import dataclasses
from collections.abc import Sequence

from cifar10.config import flags, shared_options
from cifar10.config.config import TRAIN_DIR, TRAIN_DIR_ALIAS
from cifar10.config.options import check, option
from cifar10.errors import UsageError
from cifar10.process import entry_point, invocation

HELP = "write one page on one or several runs: curves, mistakes, checkpoints"
DESCRIPTION = """Writes one page on one or several runs.

    python -m cifar10 report --train_dir runs/cifar10_train
    python -m cifar10 report runs/one runs/another --output both.html

The page shows what ran on what and where the runs differ, curves of loss,
accuracy, throughput and learning rate, the confusion matrix and the hardest
images of a checkpoint (the newest, or --step), and all checkpoints. It is one
HTML file, without scripts, and needs nothing else. It is scored as eval.py
scores, on the test set; what a run lacks, the page says. An earlier report is
replaced, another file is not. Needs the packages of the extra `report`.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to report on and where; see each field's help."""

    run_dirs: Sequence[str] = ()  # Besides `train_dir`.
    output: str | None = option(
        None, "the page (default: report.html, in the directory of a single run)"
    )
    step: str | None = shared_options.step()
    evaluate: bool = option(True, "score a checkpoint of each run")
    data_dir: str | None = shared_options.data_dir()
    device: str = shared_options.device()
    trust_model: str | None = shared_options.trust_model()
    train_dir: str | None = option(
        None,
        f"directory of a run, as RUN_DIR is (default: {TRAIN_DIR} without any RUN_DIR)",
        alias=TRAIN_DIR_ALIAS,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.step is not None and not self.evaluate:
            raise UsageError(
                f"--step {self.step} --no-evaluate: the one says what to score, the "
                "other to score nothing. Leave one of them out."
            )

    @property
    def directories(self) -> list[str]:
        """The directories of all runs."""
        given = [self.train_dir] if self.train_dir else []
        return [*self.run_dirs, *given] or [TRAIN_DIR]


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    parser.add_argument(
        "run_dirs", nargs="*", metavar="RUN_DIR", help="directory of a run"
    )
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    invocation.require_packages("report", "jinja2", "matplotlib")
    entry_point.import_tensorflow()
    from cifar10.tools.report import page

    page.write_report(options)
    return 0
