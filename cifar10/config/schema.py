"""Defines the valid content of a run's files, except for the fields of `config.json`.

A run may come from a stranger, so commands check these entries before using them.
"""

import sys
from collections.abc import Mapping
from typing import Any

from cifar10.config.fields import PRECISION
from cifar10.config.options import is_a

_STEP, _COUNT, _SCORED = (int, 0, 2**63 - 1), (int, 0, 10**12), (int, 1, 10**12)
_TIME = float, 0.0, 1e11  # Calendars end soon after.
# The type of each entry, and the least and largest value of a number. The entries of a
# checkpoint's manifest (earlier versions wrote fewer), and of its entry `validation`:
MANIFEST: Mapping[str, tuple] = {
    "step": _STEP,
    "left_out": (int, 0, 2**62),
    "skipped_steps": _COUNT,
    "loss_averages": (dict[str, float], -sys.float_info.max, sys.float_info.max),
    "gradient_noise": (dict[str, float], -sys.float_info.max, sys.float_info.max),
    "hours": (float, 0.0, 1e6),
    "time": _TIME,
    "validation": (dict,),
}
_RECORD = {"images": _COUNT, "step": _STEP, "without_gain": _COUNT}
VALIDATION: Mapping[str, tuple] = {**_RECORD, "score": (float,), "best_by": (str,)}
VALIDATION_OF_1_0 = {**_RECORD, "images": _SCORED, "correct": _COUNT}
# The entries of a line of scores, of an event, and of a process that trained the run.
SCORES = {"step": _STEP, "num_examples": _SCORED, PRECISION: (float, 0.0, 1.0)}
_MOMENT = {"step": _STEP, "time": _TIME}
EVENT: Mapping[str, tuple] = {**_MOMENT, "event": (str,), "what": (str,)}
START: Mapping[str, tuple] = {
    **_MOMENT,
    "machine": (str,),
    "devices": (str,),
    "versions": (dict[str, str],),
}
# An entry of `config.json` that a configuration may leave out.
SIZE: Mapping[str, tuple] = {"global_batch_size": (int, 1, 10**12)}


def wrong(values: Any, schema: Mapping[str, tuple], *, needs_all: bool = False) -> str:
    """Returns an entry that breaks its rule or, if `needs_all`, is missing; else ""."""
    if not isinstance(values, Mapping):
        return "all"
    for name, (kind, *limits) in schema.items():
        if name not in values and not needs_all:
            continue
        value = values.get(name, ...)  # An ellipsis is of no kind.
        items = value.values() if isinstance(value, dict) else [value]
        if not is_a(value, kind) or (
            limits and not all(limits[0] <= one <= limits[1] for one in items)
        ):
            return name
    return ""
