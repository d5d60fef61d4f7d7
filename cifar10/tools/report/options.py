"""The options of `python -m cifar10 report`."""

import dataclasses
from collections.abc import Sequence

from cifar10.config import shared_options
from cifar10.config.config import TRAIN_DIR, TRAIN_DIR_ALIAS
from cifar10.config.options import check, option
from cifar10.errors import UsageError


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
