"""The options of `python -m cifar10 plan` that a training does not have."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cifar10.config.config import Config
from cifar10.config.options import check, option
from cifar10.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan; see each field's help."""

    find_batch: bool = option(
        False, "find the largest --batch_size that fits; on GPUs a step of it is tried"
    )
    json: bool = option(False, "print the plan as JSON, in bytes")

    def __post_init__(self) -> None:
        check(self)

    def check_with(self, config: Config, given: Mapping[str, Any]) -> None:
        """Refuses flags of the training that the largest batch contradicts."""
        if not self.find_batch:
            return
        for name in ("batch_size", "global_batch_size"):
            if name in given:
                raise UsageError(
                    f"--{name} {given[name]}: --find_batch finds it. Leave one of them "
                    "out."
                )
        if config.memory.sections == "auto":
            raise UsageError(
                "--sections auto: the more sections, the larger the batch that fits. "
                "Give --find_batch their number."
            )
