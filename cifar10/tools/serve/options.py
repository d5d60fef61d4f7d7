"""The options of `python -m cifar10 serve`."""

import dataclasses

from cifar10.config import shared_options
from cifar10.config.options import check, option
from cifar10.errors import UsageError

_LARGEST = 10_000
_ONLY_FOR_RUNS = ("train_dir", "step", "use_averages", "interval_secs", "trust_model")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to serve and how; see each field's help."""

    train_dir: str = shared_options.train_dir()
    step: str | None = shared_options.step()
    savedmodel: str | None = option(
        None,
        "folder of a SavedModel that export wrote (default: follow the run)",
    )
    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(
        8000, "port to listen at; 0 for a free one", minimum=0, maximum=2**16 - 1
    )
    interval_secs: float = shared_options.interval_secs(1.0)
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
        64, "requests that may be in progress or waiting; more are refused", minimum=1
    )
    use_averages: bool = shared_options.use_averages()
    device: str = shared_options.device()
    trust_model: str | None = shared_options.trust_model()

    def __post_init__(self) -> None:
        check(self)
        if self.savedmodel is None:
            return
        for name in _ONLY_FOR_RUNS:
            if getattr(self, name) != getattr(Options, name):
                raise UsageError(
                    f"--savedmodel {self.savedmodel}: --{name} has no meaning for an "
                    "export, which never changes.\nLeave one of them out."
                )
