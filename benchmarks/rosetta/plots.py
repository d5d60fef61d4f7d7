"""What was measured, as two pictures: seconds an epoch, and accuracy over time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import Result

# Okabe and Ito's, which colour-blind readers can tell apart.
_COLOURS = (
    *("#0072B2", "#56B4E9", "#E69F00", "#CC79A7"),
    *("#D55E00", "#F0E442", "#009E73", "#000000"),
)


def draw(
    ranked: Mapping[str, Sequence[Result]], names: Sequence[str], folder: Path
) -> None:
    """Draws `time.png` and `accuracy.png`, with one part for each network.

    Args:
        ranked: The measured rows by the part's title, in order.
        names: Of all rows, which decide the colours.
        folder: Where to.
    """
    colours = dict(zip(names, _COLOURS, strict=True))
    _draw_parts(folder / "time.png", ranked, _draw_times, colours)
    _draw_parts(folder / "accuracy.png", ranked, _draw_accuracies, colours)


def _draw_parts(
    path: Path,
    ranked: Mapping[str, Sequence[Result]],
    draw_part: Callable[..., None],
    colours: Mapping[str, str],
) -> None:
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * max(1, len(ranked)), 4), layout="constrained")
    for place, (title, results) in enumerate(ranked.items(), start=1):
        axes = figure.add_subplot(1, len(ranked), place)
        axes.set_title(title)
        draw_part(axes, results, colours)
    figure.savefig(path, dpi=120, format="png")


def _draw_times(
    axes: Any, results: Sequence[Result], colours: Mapping[str, str]
) -> None:
    for place, result in enumerate(results):
        seconds = result.figures("seconds")
        median = result.median("seconds")
        spread = [[median - min(seconds)], [max(seconds) - median]]
        axes.barh(place, median, xerr=spread, color=colours[result.row.name])
        axes.text(max(seconds), place, f"  {median:,.1f}", va="center")
    axes.set_yticks(range(len(results)), [one.row.name for one in results])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seconds an epoch: median, least and most")


def _draw_accuracies(
    axes: Any, results: Sequence[Result], colours: Mapping[str, str]
) -> None:
    for result in results:
        first = [epoch for epoch in result.rounds if epoch["run"] == 0]
        if any(epoch["accuracy"] is None for epoch in first):
            continue
        axes.plot(
            list(itertools.accumulate(epoch["seconds"] for epoch in first)),
            [100 * epoch["accuracy"] for epoch in first],
            marker="o",
            markersize=3,
            color=colours[result.row.name],
            label=result.row.name,
        )
    if axes.lines:
        axes.legend(fontsize="small")
    axes.set_xlabel("seconds of training, the first run's")
    axes.set_ylabel("test accuracy, %")
