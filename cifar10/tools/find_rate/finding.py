"""Finds learning rates, prints them, and draws the losses."""

import importlib.util
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.config import paths
from cifar10.config.config import Config
from cifar10.errors import say
from cifar10.process import invocation
from cifar10.tools import outputs
from cifar10.tools.find_rate import training
from cifar10.tools.find_rate.losses import Losses
from cifar10.tools.find_rate.options import Options

_ROWS = 16
_MEANINGS = {
    "steep": "where the loss falls fastest",
    "minimum": "a tenth of where it is lowest",
}


def run(config: Config, options: Options, given: Mapping[str, Any]) -> bool:
    """Finds rates and prints them; returns whether there are any.

    `given` are the flags of the training.
    """
    place = paths.locate(options.plot)
    mark = {".svg": "DOCTYPE svg", ".png": "PNG"}[place.suffix]
    outputs.check(place, "--plot", "plot", mark)
    found = training.find(
        config,
        lowest=options.lowest,
        highest=options.highest,
        steps=options.steps,
        announce=say,
    )
    drawn = _draw(found, place)
    if options.json:
        print(json.dumps(_as_json(found, place if drawn else None)))
    else:
        print("\n".join(_lines(found, given)))
    if drawn:
        say(f"The losses are drawn in {place}")
    return bool(found.suggestions)


def _draw(found: Losses, place: Path) -> bool:
    """Draws the losses if that is possible; says what is missing otherwise."""
    if not importlib.util.find_spec("matplotlib"):
        missing = f"{place} is not drawn: that needs matplotlib. Install with"
        say(f"{missing} {invocation.to_install('report')}.")
        return False
    from cifar10.tools.find_rate import plot

    outputs.write(place, "--plot", plot.draw(found, place.suffix[1:]))
    return True


def _as_json(found: Losses, place: Path | None) -> dict[str, Any]:
    return {
        "suggestions": found.suggestions,
        "exploded": found.has_exploded,
        "learning_rates": found.rates.tolist(),
        "losses": found.losses.tolist(),
        "smoothed": found.smoothed.tolist(),
        "plot": str(place) if place else None,
    }


def _lines(found: Losses, given: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'learning rate':>13}  {'loss':>10}"
    last = len(found.rates) - 1
    for number in sorted({last * row // (_ROWS - 1) for row in range(_ROWS)}):
        yield f"{found.rates[number]:>13.1e}  {found.smoothed[number]:>10.4g}"
    if found.has_exploded:
        yield f"{'above':>13}    explodes"
    yield ""
    if not found.suggestions:
        yield "The loss has not fallen: there is nothing to suggest. Give more --steps,"
        yield "or a higher --highest."
        return
    for name, rate in found.suggestions.items():
        yield f"--learning_rate {rate:<8g}  {name}: {_MEANINGS[name]}"
    words = [f"--{name}={value}" for name, value in given.items()]
    # Both lie well below where the loss explodes.
    rate = max(found.suggestions.values())
    command = shlex.join([*words, f"--learning_rate={rate:g}"])
    yield f"Next: {invocation.of('train')} {command}"
