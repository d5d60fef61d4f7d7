"""The options of `python -m cifar10 serve`."""

from __future__ import annotations

import dataclasses

from cifar10.config import common
from cifar10.config.options import check, option
from cifar10.errors import UsageError

_LARGEST = 10_000


@dataclasses.dataclass(frozen=True)
class Options:
    """What to serve and how; see each field's help."""

    train_dir: str = common.train_dir()
    savedmodel: str | None = option(
        None,
        "folder of a SavedModel of python -m cifar10 export (default: follow the run)",
    )
    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(
        8000, "port to listen at; 0 for a free one", minimum=0, maximum=2**16 - 1
    )
    interval_secs: float = option(
        1.0,
        "seconds between two looks for a new checkpoint",
        minimum=1e-3,
        maximum=_LARGEST,
    )
    max_request_mb: float = option(
        10.0, "largest request, in millions of bytes", minimum=1e-6, maximum=_LARGEST
    )
    timeout_secs: float = option(
        10.0,
        "seconds that a client may take to send its request",
        minimum=1e-3,
        maximum=_LARGEST,
    )
    queue: int = option(
        64,
        "requests that may be at work or wait; further ones are told to come back",
        minimum=1,
        maximum=_LARGEST,
    )
    use_averages: bool = common.use_averages()
    device: str = common.device()

    def __post_init__(self) -> None:
        check(self)
        if self.savedmodel is not None:
            self._check_savedmodel()

    def _check_savedmodel(self) -> None:
        """Refuses what only matters to a run that is followed."""
        default = Options()
        if self.train_dir != default.train_dir:
            raise UsageError(
                "--train_dir and --savedmodel: one of them is served. Leave one out."
            )
        if self.use_averages != default.use_averages:
            raise UsageError(
                "--no-use_averages and --savedmodel: an export has one set of "
                "variables. Leave the flag out, and give it to python -m cifar10 "
                "export."
            )
        if self.interval_secs != default.interval_secs:
            raise UsageError(
                f"--interval_secs {self.interval_secs:g} and --savedmodel: an export "
                "never changes, so nothing looks for a checkpoint. Leave the flag out."
            )
