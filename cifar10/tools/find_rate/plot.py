"""Draws losses over learning rates."""

import io

import numpy as np

from cifar10.tools.find_rate.losses import Losses

_INCHES = (6.0, 3.6)
# As in the charts of the report.
_LOSS, *_SUGGESTED = ("#3b7fc4", "#d9702f", "#35996a")
_GREY = "#8a929b"


def draw(found: Losses, kind: str) -> bytes:
    """Returns an image of this kind, `svg` or `png`."""
    # Not pyplot, which looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses, color=_LOSS, alpha=0.3, linewidth=0.8)
    axes.plot(found.rates, found.smoothed, color=_LOSS, linewidth=1.8)
    for colour, (name, rate) in zip(
        _SUGGESTED, found.suggestions.items(), strict=False
    ):
        axes.axvline(rate, color=colour, linewidth=1.2, label=f"{name}: {rate:g}")
    low, high = found.smoothed.min(), np.median(found.smoothed)
    # Exploded losses would flatten the fall.
    axes.set_ylim(low - 0.1 * abs(high), 1.5 * high)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.grid(color=_GREY, alpha=0.3)
    axes.spines[["right", "top"]].set_visible(False)
    if found.suggestions:
        axes.legend(frameon=False)
    output = io.BytesIO()
    figure.savefig(output, format=kind, dpi=150)
    return output.getvalue()
