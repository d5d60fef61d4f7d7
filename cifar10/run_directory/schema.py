"""Declares what the files of a run may hold, by which all commands read them.

A run may come from a stranger. Entries that are not declared are not read.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from cifar10.config.options import Checked, Count, CountOrZero, Fraction, Range, options

Step: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
_Finite: TypeAlias = Annotated[float, Range(-sys.float_info.max, sys.float_info.max)]
_Time: TypeAlias = Annotated[float, Range(0.0, 1e11)]  # Calendars end soon after.


@dataclasses.dataclass(kw_only=True)
class Manifest(Checked):
    """Entries of a checkpoint's manifest; an earlier version wrote fewer."""

    step: Step
    seed: int
    global_batch_size: Count
    left_out: Annotated[int, Range(0, 2**62)]
    skipped_steps: CountOrZero
    loss_averages: dict[str, _Finite]
    hours: Annotated[float, Range(0.0, 1e6)]
    time: _Time
    validation: dict


@dataclasses.dataclass(kw_only=True)
class Validation(Checked):
    """The entry `validation` of a manifest (see early_stopping.py)."""

    images: CountOrZero
    step: Step
    without_gain: CountOrZero
    score: float
    best_by: str


@dataclasses.dataclass(kw_only=True)
class Start(Checked):
    """A line of starts.jsonl: a process that trained the run, from a step on."""

    step: Step
    time: _Time
    machine: str
    devices: str
    versions: dict[str, str]


@dataclasses.dataclass(kw_only=True)
class Scores(Checked):
    """A line of scores; `precision` stands for `precision @ 1`."""

    step: Step
    num_examples: Count
    precision: Fraction


def wrong(values: Any, declared: Any, *, needs_all: bool = False) -> str | None:
    """Returns the name of an entry that breaks its declaration, or is missing."""
    if not isinstance(values, Mapping):
        return declared.__name__
    for name, one in options(declared).items():
        if one.problem(values[name]) if name in values else needs_all:
            return name
    return None
