"""The options of `python -m cifar10 data` that a training does not have."""

import dataclasses

from cifar10.config.options import check, option


@dataclasses.dataclass(frozen=True)
class Options:
    """How to show a data set; see each field's help."""

    contact_sheet: str | None = option(
        None, "PNG of some pictures of each class (default: one in the cache)"
    )
    json: bool = option(False, "print all that was found as JSON")

    def __post_init__(self) -> None:
        check(self)
