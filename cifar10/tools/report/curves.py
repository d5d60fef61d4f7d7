"""Draws the report's curves as SVG.

No text of a run is drawn, so that the page may include the SVG without escaping it.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Readable on white and on black; with more runs than colours the lines are dashed.
COLOURS = (
    "#3b7fc4",
    "#d9702f",
    "#35996a",
    "#9a60b4",
    "#b08a1e",
    "#2a9fac",
    "#cf5a87",
    "#7a858f",
)
_DASHES = ("-", "--", ":", "-.")
_GREY = "#8a929b"
_INCHES = (6.0, 3.1)
# Up to this number of points each one is marked.
_MAX_MARKED = 40


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        number: The run's number, from 1, which determines the colour.
        lines: Lines of the run's log, each with its step.
        metric: The metric to draw; lines without it are left out.
        faint: Whether the line is the background of another one.
    """

    number: int
    lines: Sequence[Mapping[str, float]]
    metric: str
    faint: bool = False


def draw(
    name: str, series: Sequence[Series], tick_format: str, *, from_zero: bool = False
) -> str:
    """Draws a chart over steps.

    Args:
        name: Name of the chart; the line of run 2 has the id `name-2`.
        series: The chart's lines.
        tick_format: Format of a value `x` on the vertical axis, such as `{x:g}`.
        from_zero: Whether the vertical axis begins at zero.

    Returns:
        An SVG element; empty if there is nothing to draw.
    """
    if not any(
        math.isfinite(line.get(one.metric, math.nan))
        for one in series
        for line in one.lines
    ):
        return ""
    # Not pyplot, which looks for a display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    with rc_context({"svg.fonttype": "none"}):  # Keeps text as text.
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for one in series:
            _add(axes, name, one)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter(tick_format))
        axes.set_xlabel("step")
        axes.tick_params(length=0)
        axes.grid(axis="y", color=_GREY, alpha=0.3)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_GREY)
        output = io.StringIO()
        figure.savefig(output, format="svg", transparent=True)
    svg = output.getvalue()
    svg = svg[svg.index("<svg") :]
    # Styles would hold for the whole page, and two charts number their elements alike.
    svg = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    return re.sub(r' id="[\w.]+_\d+"', "", svg)


def _add(axes: Axes, name: str, series: Series) -> None:
    lines = [line for line in series.lines if series.metric in line]
    index = series.number - 1
    (curve,) = axes.plot(
        [line["step"] for line in lines],
        [line[series.metric] for line in lines],
        _DASHES[index // len(COLOURS) % len(_DASHES)],
        color=COLOURS[index % len(COLOURS)],
        alpha=0.3 if series.faint else 1.0,
        linewidth=0.8 if series.faint else 1.8,
        marker=None if series.faint or len(lines) > _MAX_MARKED else "o",
        markersize=3.5,
        zorder=2 if series.faint else 3,
    )
    curve.set_gid(f"{name}-{series.number}{'-faint' if series.faint else ''}")
