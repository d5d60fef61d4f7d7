"""What the losses at rising rates say (https://arxiv.org/abs/1506.01186)."""

import dataclasses
import functools

import numpy as np

# A loss this many times the lowest average has exploded, as in fastai's lr_find.
EXPLODED = 4.0
# Decay of the average that decides this, as in fastai's Recorder.
_AVERAGE_DECAY = 0.98
# A curve is smoothed over this part of its steps. The average above would lag behind.
_SMOOTHED_PART = 0.1
# If the lowest loss is not below this part of the first one, the loss has not fallen.
_FALL = 0.98


class Average:
    """The average loss of the newest steps, and whether that has exploded."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._lowest = np.inf

    def explodes(self, loss: float) -> bool:
        """Adds the loss of a step; returns whether the training should end."""
        self._sum = _AVERAGE_DECAY * self._sum + (1 - _AVERAGE_DECAY) * loss
        self._weight = _AVERAGE_DECAY * self._weight + (1 - _AVERAGE_DECAY)
        average = self._sum / self._weight
        self._lowest = min(self._lowest, average)
        return not average <= EXPLODED * self._lowest  # True for NaN.


@dataclasses.dataclass(frozen=True)
class Losses:
    """The finite losses of a training whose rate has risen."""

    rates: np.ndarray  # float64 [steps], ascending by the same factor.
    losses: np.ndarray  # float64 [steps], each before the update at its rate.
    has_exploded: bool

    @functools.cached_property
    def smoothed(self) -> np.ndarray:
        """The losses, each averaged with its neighbours, float64 [steps].

        An exploded loss counts as `EXPLODED` times the median, so that it does not
        affect many earlier steps.
        """
        losses = np.minimum(self.losses, EXPLODED * np.median(self.losses))
        width = max(3, int(_SMOOTHED_PART * len(losses)))
        window = np.hanning(width + 2)[1:-1]
        weights = np.convolve(np.ones(len(losses)), window, "same")
        return np.convolve(losses, window, "same") / weights

    @property
    def suggestions(self) -> dict[str, float]:
        """Rates to try by the names that fastai has for them; empty without a fall.

        `steep` is where the loss falls fastest over the logarithm of the rate, and
        `minimum` a tenth of the rate at which it is lowest.
        """
        lowest = int(self.smoothed.argmin())
        if lowest < 2 or self.smoothed[lowest] > _FALL * self.smoothed[0]:
            return {}
        falls = np.diff(self.smoothed[: lowest + 1])
        return {
            "steep": _rounded(self.rates[falls.argmin()]),
            "minimum": _rounded(self.rates[lowest] / 10),
        }


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")
