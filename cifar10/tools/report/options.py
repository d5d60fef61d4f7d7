"""The options of `python -m cifar10 report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cifar10.config import common
from cifar10.config.options import check, option


@dataclasses.dataclass(frozen=True)
class Options:
    """What to report on and where; see each field's help.

    Attributes:
        run_dirs: Directories of the runs.
    """

    run_dirs: Sequence[str]
    output: str | None = option(
        None, "the page (default: report.html, in the directory of a single run)"
    )
    evaluate: bool = option(True, "score the newest intact checkpoints")
    data_dir: str | None = common.data_dir()
    device: str = common.device()

    def __post_init__(self) -> None:
        check(self)
