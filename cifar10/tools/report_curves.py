"""Draws the report's curves as SVG.

The curves contain no text of a run, so the page includes the SVG without escaping it.
"""

import io
import re
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure  # Not pyplot, which looks for a display.
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

# Readable on white and on black. If there are more runs than colours, curves of the
# other runs are dashed.
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
# Curves of up to this many points have a marker at each point.
_MAX_MARKED = 40


def draw(
    name: str,
    logs: Sequence[Sequence[Mapping[str, float]]],
    metrics: Sequence[str],
    tick_format: str,
    *,
    from_zero: bool = False,
    logarithmic: bool = False,
    over: str = "step",
) -> str:
    """Draws runs' metrics as an SVG element; empty if there is nothing to draw.

    Args:
        name: Prefix of the curves' ids; the curve of the second run is `name-2`.
        logs: `logs[run][line]` maps names to values.
        metrics: Names of the metrics to draw. The first one that is in `logs` is drawn
            boldly, the others faintly.
        tick_format: Format of the vertical axis's numbers, such as `{x:.2f}`.
        from_zero: Whether the vertical axis begins at zero.
        logarithmic: Whether the vertical axis is logarithmic.
        over: Name of the values on the horizontal axis.
    """
    drawn = [m for m in metrics if any(m in line for log in logs for line in log)]
    if not drawn:
        return ""
    with rc_context({"svg.fonttype": "none"}):  # Does not turn text into paths.
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for number, log in enumerate(logs):
            for metric in drawn:
                lines = [line for line in log if metric in line]
                faint = metric != drawn[0]
                (curve,) = axes.plot(
                    [line[over] for line in lines],
                    [line[metric] for line in lines],
                    linestyle=_DASHES[number // len(COLOURS) % len(_DASHES)],
                    color=COLOURS[number % len(COLOURS)],
                    alpha=0.3 if faint else 1.0,
                    linewidth=0.8 if faint else 1.8,
                    marker=None if faint or len(lines) > _MAX_MARKED else "o",
                    markersize=3.5,
                    zorder=2 if faint else 3,
                )
                curve.set_gid(f"{name}-{number + 1}{'-faint' * faint}")
        if from_zero:
            axes.set_ylim(bottom=0)
        if logarithmic:
            axes.set_yscale("log")
            axes.minorticks_off()
        axes.set_xlim(left=0)
        if over == "step":
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        else:  # Both axes are fractions, which should be equal.
            axes.axline((0, 0), (1, 1), color=_GREY, linestyle=":")
        decades = LogLocator(subs=(1, 2, 5))
        axes.yaxis.set_major_locator(decades if logarithmic else MaxNLocator(5))
        axes.yaxis.set_major_formatter(StrMethodFormatter(tick_format))
        axes.set_xlabel(over)
        axes.tick_params(length=0)
        axes.grid(axis="y", color=_GREY, alpha=0.3)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_GREY)
        output = io.StringIO()
        figure.savefig(output, format="svg", transparent=True)
    svg = output.getvalue()
    svg = svg[svg.index("<svg") :]
    # Styles would apply to the whole page, and ids would repeat in the next chart.
    svg = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    return re.sub(r' id="[\w.]+_\d+"', "", svg)
