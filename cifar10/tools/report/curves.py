"""Curves as SVG that takes its colours from the page, in light and in dark.

Matplotlib writes each colour as a number, so colours that nobody would choose stand for
the page's own and are replaced. No text of a run is drawn: the page names the runs.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of the page; with more runs than colours the lines are dashed.
COLOURS = 8
_DASHES = ("-", "--", ":", "-.")
_INK, _LINE = "#000001", "#000002"
_INCHES = (6.0, 3.1)
_FONT_SIZE = 10
# So few points are marked, since a line alone hides where they are.
_FEW = 40


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        number: The run's number, from 1, which is its colour.
        steps: Where it has values.
        values: Its values; NaN leaves a gap.
        faint: Whether it stands behind another line of the same run.
    """

    number: int
    steps: Sequence[int]
    values: Sequence[float]
    faint: bool = False


def draw(
    name: str,
    label: str,
    series: Sequence[Series],
    form: Callable[[float], str],
    *,
    from_zero: bool = False,
) -> str:
    """Draws a chart over steps.

    Args:
        name: Name of the chart; the line of run 2 has the id `name-2`.
        label: What it shows, for those who cannot see it.
        series: Its lines.
        form: Writes a value on the vertical axis.
        from_zero: Whether the vertical axis begins at zero.

    Returns:
        An SVG element; empty where there is no value to draw.
    """
    if not any(math.isfinite(value) for one in series for value in one.values):
        return ""
    # Not pyplot, which would look for a display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # Texts stay texts; ids of two charts differ.
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": _FONT_SIZE}
    ):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for one in series:
            _add(axes, name, one)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
        axes.set_xlabel("step", color=_INK)
        axes.tick_params(color=_LINE, labelcolor=_INK, length=0)
        axes.grid(axis="y", color=_LINE, linewidth=0.8)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_LINE)
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _for_the_page(written.getvalue(), label)


def _add(axes: Axes, name: str, one: Series) -> None:
    dashes = _DASHES[(one.number - 1) // COLOURS % len(_DASHES)]
    (line,) = axes.plot(
        one.steps,
        one.values,
        dashes,
        color=f"#0001{(one.number - 1) % COLOURS + 1:02d}",
        alpha=0.3 if one.faint else 1.0,
        linewidth=0.8 if one.faint else 1.8,
        marker=None if one.faint or len(one.steps) > _FEW else "o",
        markersize=3.5,
        zorder=2 if one.faint else 3,
    )
    line.set_gid(f"{name}-{one.number}{'-faint' if one.faint else ''}")


def _for_the_page(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    # Its own numbers of elements would be twice on a page with two charts.
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    svg = svg.replace(_INK, "var(--muted)").replace(_LINE, "var(--line)")
    return re.sub(r"#0001(\d\d)", lambda found: f"var(--run-{int(found[1])})", svg)
