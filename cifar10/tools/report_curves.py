"""Draws the report's curves as SVG pictures."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure  # Not pyplot, which looks for a display.

# The colour of each run; further runs begin again with the first one.
COLOURS = tuple(TABLEAU_COLORS.values())
_MOST_MARKERS = 40  # A curve of more points is a line alone.
_GREY = "#8a929b"  # Readable on white and on black.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # Does not turn text into paths.
    "text.color": _GREY,
    "axes.labelcolor": _GREY,
    "axes.edgecolor": _GREY,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
}


def draw(
    logs: Sequence[Sequence[Mapping[str, float]]], metric: str, over: str = "step"
) -> str:
    """Draws a metric of several runs as the URL of an SVG picture.

    Args:
        logs: `logs[run][line]` maps names to values. The id of a run's curve in the
            picture is its number, from 1.
        metric: Name of the values on the vertical axis.
        over: Name of the values on the horizontal axis.

    Returns:
        The URL contains the picture; it is empty if there is nothing to draw.
    """
    if not any(metric in line for log in logs for line in log):
        return ""
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.0, 3.1), layout="constrained")
        axes = figure.add_subplot()
        for number, log in enumerate(logs):
            lines = [line for line in log if metric in line]
            axes.plot(
                [line[over] for line in lines],
                [line[metric] for line in lines],
                color=COLOURS[number % len(COLOURS)],
                marker="." if len(lines) <= _MOST_MARKERS else None,
                gid=f"curve-{number + 1}",
            )
        if over != "step":  # Both axes are fractions, which should be equal.
            axes.axline((0, 0), (1, 1), color=_GREY, linestyle=":")
        axes.set_xlabel(over)
        axes.grid(axis="y", alpha=0.3)
        output = io.BytesIO()
        figure.savefig(output, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(output.getvalue()).decode()}"
