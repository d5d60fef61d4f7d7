"""The options of `python -m cifar10 find-rate` that a training does not have."""

import dataclasses

from cifar10.config.options import check, option
from cifar10.errors import UsageError

KINDS = (".svg", ".png")
# Far more than a curve needs.
_MOST_STEPS = 100_000


@dataclasses.dataclass(frozen=True)
class Options:
    """How the rate rises, and what is written; see each field's help."""

    # The first and the last rate of fastai's lr_find.
    lowest: float = option(1e-7, "rate of the first step", minimum=1e-30)
    highest: float = option(10.0, "rate of the last step", maximum=1e30)
    steps: int = option(300, "steps to train", minimum=30, maximum=_MOST_STEPS)
    plot: str = option(
        "learning_rates.svg", "SVG or PNG of the losses; an earlier one is replaced"
    )
    json: bool = option(False, "print all that was found as JSON")

    def __post_init__(self) -> None:
        check(self)
        if self.lowest >= self.highest:
            raise UsageError(
                f"--lowest {self.lowest}: it has to be below --highest {self.highest}."
            )
        if not self.plot.endswith(KINDS):
            raise UsageError(
                f"--plot {self.plot}: it is a file whose name ends with "
                f"{' or '.join(KINDS)}."
            )
