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
_GREY = "#8a929b"  # Readable on white and on black.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # Does not turn text into paths.
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), _GREY),
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
    drawn = [[line for line in log if metric in line] for log in logs]
    if not (values := {line[metric] for lines in drawn for line in lines}):
        return ""
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.0, 3.1), layout="constrained")
        axes = figure.add_subplot()
        for number, lines in enumerate(drawn):
            points = ([line[name] for line in lines] for name in (over, metric))
            colour = COLOURS[number % len(COLOURS)]
            marker = "." if len(lines) <= 40 else None  # Else a line alone.
            axes.plot(*points, color=colour, marker=marker, gid=f"curve-{number + 1}")
        if len(values) == 1:  # A constant would get an axis of a few percent.
            axes.set_ylim(*sorted((0, 1.2 * values.pop() or 1)))
        if over != "step":  # Both axes are fractions, which should be equal.
            axes.axline((0, 0), (1, 1), color=_GREY, linestyle=":")
            for line in drawn[0]:
                place = line[over], line[metric]
                axes.annotate(f"  {line['images']:,.0f}", place, fontsize=7, va="top")
        axes.set_xlabel(over)
        axes.grid(axis="y", alpha=0.3)
        output = io.BytesIO()
        figure.savefig(output, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(output.getvalue()).decode()}"
