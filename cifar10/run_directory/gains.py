"""Whether a run's score still rises, as its checkpoints record it.

The manifest of a checkpoint holds the best score of the training's own evaluations and
how many have come since. So a run that is resumed, or rolled back, decides as if it had
not been interrupted, whatever has become of the logs, and whoever follows it knows from
its newest checkpoint whether it has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cifar10.run_directory import scores

_ENTRY = "validation"
_LARGEST_COUNT = 10**12  # Of images, steps or evaluations.


@dataclasses.dataclass(frozen=True)
class Gains:
    """The best evaluation so far, and how many have come since without a gain."""

    correct: int = 0
    images: int = 0  # Without an evaluation there are none.
    step: int = 0
    without_gain: int = 0

    @property
    def precision(self) -> float:
        """The best score: precision @ 1."""
        return self.correct / self.images

    def after(self, step: int, correct: int, images: int) -> Gains:
        """Returns the gains after one more evaluation; an equal score is no gain."""
        newest = {step: correct / images}
        known = {self.step: self.precision} if self.images else {}
        if scores.ranked({**known, **newest})[0] == step:
            return Gains(correct, images, step)
        return dataclasses.replace(self, without_gain=self.without_gain + 1)

    def have_ended(self, evaluations: int | None) -> bool:
        """Returns whether there was no gain for that many evaluations in a row."""
        return evaluations is not None and self.without_gain >= evaluations

    def facts(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint's manifest; none before an evaluation."""
        return {_ENTRY: dataclasses.asdict(self)} if self.images else {}


def of(manifest: Mapping[str, Any]) -> Gains:
    """Returns what a checkpoint's manifest records.

    Raises:
        ValueError, TypeError: It is nothing that a training records.
    """
    gains = Gains(**manifest.get(_ENTRY, {}))
    counts = dataclasses.astuple(gains)
    if not all(type(count) is int and 0 <= count < _LARGEST_COUNT for count in counts):
        raise ValueError(f"{_ENTRY}: {counts}")
    if gains.correct > gains.images or (gains.without_gain and not gains.images):
        raise ValueError(f"{_ENTRY}: {counts}")
    return gains
