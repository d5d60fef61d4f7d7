"""The options of `python -m cifar10 doctor`."""

import dataclasses

from cifar10.config import shared_options
from cifar10.config.options import check, option


@dataclasses.dataclass(frozen=True)
class Options:
    """What to look at; see each field's help."""

    train_dir: str = shared_options.train_dir("directory of runs")
    data_dir: str | None = option(
        None,
        "directory of the data set (default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)",
    )
    compute: bool = option(True, "compute a little on each device")
    seconds: float = option(
        120.0,
        "seconds that each computation may take; a new GPU compiles for minutes",
        minimum=1e-3,
        maximum=86_400,
    )
    json: bool = option(False, "print all that was found as JSON")

    def __post_init__(self) -> None:
        check(self)
