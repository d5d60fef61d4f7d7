"""How fast the steps run, and what limits them."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

# Below this part of the time, waiting for images is not worth a change.
_MUCH_WAITING = 0.1
# A forecast needs one slow step, or many fast ones, which differ.
_FORECAST_AFTER = 2.0


class _Window(NamedTuple):
    steps: int
    seconds: float
    waiting: float  # The part of `seconds` in which the towers had no images.


class Throughput:
    """Measures examples a second over a window, by a clock of the steps' seconds.

    The clock stands still outside of steps, as during tracing or saving.
    """

    def __init__(self, global_batch_size: int, clock: Callable[[], float]) -> None:
        self._windows: list[_Window] = []
        self._global_batch_size = global_batch_size
        self._is_forecast = False
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Starts a new window and forgets the current one."""
        self._began = self._clock()
        self._counted = 0
        self._waited = 0.0

    def count(self, steps: int = 1, waited: float = 0.0) -> None:
        """Counts steps into the window, and the seconds they waited for images."""
        self._counted += steps
        self._waited += waited

    def take(self) -> float:
        """Ends the window and starts the next; call it when all devices are idle.

        Returns examples a second; NaN where no step was counted.
        """
        window = self._window()
        self.restart()
        if not window.steps or window.seconds <= 0:
            return math.nan
        self._windows.append(window)
        return window.steps * self._global_batch_size / window.seconds

    def allows_forecast(self) -> bool:
        """Returns whether the steps timed so far allow the first forecast."""
        return not self._is_forecast and self._total().seconds >= _FORECAST_AFTER

    def forecast(self, steps: int) -> float:
        """Returns how many seconds `steps` more take; call it when devices are idle."""
        self._is_forecast = True
        total = self._total()
        return steps * total.seconds / total.steps

    def _window(self) -> _Window:
        return _Window(self._counted, self._clock() - self._began, self._waited)

    def _total(self) -> _Window:
        windows = [_Window(0, 0.0, 0.0), *self._windows]
        if self._counted:
            windows.append(self._window())
        return _Window(*map(sum, zip(*windows, strict=True)))

    def verdict(self) -> str:
        """Returns what limits the steps; empty if none was counted."""
        total = self._total()
        if not total.seconds:
            return ""
        part = min(total.waiting / total.seconds, 1.0)
        amount = f"{part:.0%}" if part >= 0.01 else "less than 1%"
        waited = f"the towers waited {amount} of the time for images."
        if part < _MUCH_WAITING:
            return f"Compute-bound: {waited}"
        return (
            f"Input-bound: {waited}\n"
            "More CPU cores help, or on GPUs --input_device gpu."
        )

    def median_step(self) -> tuple[float, float] | None:
        """Returns the seconds of a step, and how long of it the towers had no images.

        They come from the median window, because the first ones of a run are slower;
        None if no step was counted.
        """
        steps = [(w.seconds / w.steps, w.waiting / w.steps) for w in self._windows]
        return statistics.median_high(steps) if steps else None
