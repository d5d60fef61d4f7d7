"""What was measured, as a picture."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import KERAS, OURS, PYTORCH, TUTORIAL, Result

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {
    OURS: "#0072B2",
    TUTORIAL: "#E69F00",
    KERAS: "#CC79A7",
    PYTORCH: "#009E73",
}


def draw(results: Sequence[Result], about: dict[str, Any], path: Path) -> str:
    """Draws a bar for each training row, with the range of its windows.

    Args:
        results: One for each row.
        about: As for `report.markdown`.
        path: The PNG file to write.

    Returns:
        Why there is no picture; empty if there is one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: pip install -e .[peers]"
    shown = [one for one in results if one.row.is_training and one.is_measured]
    if not shown:
        return "no training row was measured"
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.3 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    medians = [statistics.median(one.rates) for one in shown]
    ranges = [
        [median - min(one.rates), max(one.rates) - median]
        for median, one in zip(medians, shown, strict=True)
    ]
    places = range(len(shown))
    axes.barh(
        places,
        medians,
        xerr=list(zip(*ranges, strict=True)),
        color=[_COLOURS[one.row.family] for one in shown],
        ecolor="0.3",
    )
    axes.set_yticks(places, [_label(one) for one in shown])
    axes.invert_yaxis()
    axes.bar_label(axes.containers[1], [f" {median:,.0f}" for median in medians])
    axes.margins(x=0.12, y=0.01)
    axes.set_xlabel("images a second: median, least and most of the windows")
    axes.set_title(
        f"{about['processor']}, {about['cores']} cores; commit {about['commit']}, "
        f"{about['date'][:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120, format="png")
    return ""


def _label(result: Result) -> str:
    return f"{result.row.name} ({result.row.input}, {result.precision})"
