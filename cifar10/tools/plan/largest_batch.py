"""Finds the largest batch of a tower whose step fits into the memory."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.sections import assembly as sections
from cifar10.tools.plan import one_step, step as steps

# A batch that is larger than the one found by less than this part may fit too: the
# estimate is no more exact than that.
_TOLERANCE = 0.01
# After a step that failed on a GPU, the next one has this part of its batch.
_SMALLER = 0.9
_MOST_TRIES = 8


@dataclasses.dataclass(frozen=True)
class Found:
    """The largest batch, and how it was found."""

    batch_size: int  # Images per tower; 0 if not even one fits.
    estimated_bytes: float  # Of its step, or of one with a single image.
    limit: float  # Bytes.
    most: int  # The largest batch that the training set allows.
    failures: Mapping[int, str]  # Why steps that were tried have failed, by batch size.
    is_verified: bool  # Whether a step of it has run.


def find(requested: Config, announce: Callable[[str], None]) -> Found:
    """Finds the largest batch by the planner's estimate, and on GPUs tries a step."""
    requested = requested.replace(batch_size=1, global_batch_size=None)
    step = steps.build(requested, announce)
    limit = sections.memory_limit(step.config, step.placement, step.planner)
    if math.isinf(limit):
        raise UsageError(
            "--find_batch: how much memory is free cannot be found out here. Give "
            "--memory_limit."
        )
    most = steps.examples(step.config) // step.config.global_batch_size

    @functools.cache
    def bytes_of(batch_size: int) -> float:
        announce(f"Batches of {batch_size:,} ...")
        planner = step.of_batch_size(batch_size).planner
        planner.announce = lambda _: None
        return planner.total_bytes(
            planner.choose(step.config.memory.sections, lambda: math.inf)
        )

    size = largest(bytes_of, limit, max(1, most))
    failures: dict[int, str] = {}
    while size and step.placement.on_gpus and len(failures) < _MOST_TRIES:
        announce(f"Trying a step with --batch_size {size} ...")
        tried = requested.replace(batch_size=size)
        # This process also holds some of the memory, but no more than is left free.
        error = one_step.why_not(tried)
        if not error:
            return Found(size, bytes_of(size), limit, most, failures, True)
        failures[size] = error
        size = int(_SMALLER * size)
    size = 0 if failures else size
    return Found(size, bytes_of(max(1, size)), limit, most, failures, False)


def largest(bytes_of: Callable[[int], float], limit: float, most: int) -> int:
    """Returns the largest batch from 1 to `most` that fits into `limit`, or 0.

    A step's memory grows almost linearly with its batch, so the interval is divided
    where a line through its ends reaches the limit; every other time it is halved, in
    case the growth is not linear. It ends within `_TOLERANCE`.
    """
    if bytes_of(1) > limit:
        return 0
    if bytes_of(most) <= limit:
        return most
    low, high = 1, most
    number = 0
    while (width := high - low) > (allowed := max(1, int(_TOLERANCE * low))):
        number += 1
        part = (limit - bytes_of(low)) / (bytes_of(high) - bytes_of(low))
        # At least this much further: if that does not fit, the end is found.
        step = max(allowed, int(part * width)) if number % 2 else width // 2
        middle = low + min(step, width - 1)
        if bytes_of(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
