"""How long a training is: by `max_steps`, `max_epochs` or `max_hours`, one of them.

Epochs become steps when the training set is known, and `config.json` records both, so
whatever follows knows only steps. Hours leave the number of steps open.
"""

import math
from collections.abc import Mapping
from typing import Any

from cifar10.errors import UsageError

NAMES = ("max_steps", "max_epochs", "max_hours")
# The `max_steps` of a training whose number of steps is open, or not known yet.
OPEN = 10**12


def completed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `base` and `given` together, of which one is the length.

    A given length replaces that of `base`, a recipe or a run.

    Raises:
        UsageError: The values name two lengths.
    """
    chosen = [name for name in NAMES if given.get(name) is not None]
    kept = {k: v for k, v in base.items() if not (chosen and k in NAMES)}
    values = {**kept, **given}
    is_of_run = not chosen and "train_dir" in base  # Which may record two.
    named = [f"{name} {values[name]}" for name in NAMES if values.get(name) is not None]
    if len(named) > 1 and not is_of_run:
        both = " and ".join(f"--{one}" for one in named)
        raise UsageError(f"{both} say the same thing, how long to train; give one.")
    if named and "max_steps" not in values:
        values["max_steps"] = OPEN
    return values


def steps_of(epochs: float, images: int, global_batch_size: int) -> int:
    """Returns the steps in which so many epochs of a training set have been seen."""
    return max(1, math.ceil(round(epochs * images / global_batch_size, 6)))


def is_time_up(settings: Mapping[str, Any], hours: float) -> bool:
    """Returns whether a run has trained as long as its `max_hours`, if it has any."""
    return hours >= (settings.get("max_hours") or math.inf)


def doubled(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns twice the length of a run that has reached a step."""
    longer = {name: 2 * values[name] for name in NAMES[1:] if values.get(name)}
    return longer or {"max_steps": 2 * step}
