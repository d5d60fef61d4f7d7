"""The options of `python -m cifar10 predict`."""

import dataclasses
from collections.abc import Sequence

from cifar10.config import shared_options
from cifar10.config.options import check, option
from cifar10.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Options:
    """What to predict and how; see each field's help.

    Attributes:
        images: Files, folders, or `-` for a list on standard input.
    """

    images: Sequence[str]
    train_dir: str = shared_options.train_dir()
    step: str | None = shared_options.step()
    follow: bool = option(False, "predict again at each new checkpoint")
    interval_secs: float = shared_options.interval_secs(5.0)
    top_k: int | None = option(
        None, "how many classes to name (default: 3, or all of fewer)", minimum=1
    )
    use_averages: bool = shared_options.use_averages()
    device: str = shared_options.device()
    trust_model: str | None = shared_options.trust_model()
    json: bool = option(False, "print JSON, one object per image")

    def __post_init__(self) -> None:
        check(self)
        if self.follow and self.step is not None:
            raise UsageError(
                f"--follow --step {self.step}: the one predicts with each new "
                "checkpoint, the other with one. Leave one of them out."
            )
