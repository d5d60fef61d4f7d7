"""What was measured, as two pictures: seconds an epoch, and accuracy over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rosetta.rows import ROWS, Result, ranked

_TITLES = {"cnn": "CNN on CIFAR-10", "gru": "GRU on IMDB"}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = dict(
    zip(
        (row.name for row in ROWS),
        (
            "#0072B2",
            "#56B4E9",
            "#E69F00",
            "#CC79A7",
            "#D55E00",
            "#F0E442",
            "#009E73",
            "#000000",
        ),
        strict=True,
    )
)


def draw(results: Sequence[Result], time_path: Path, accuracy_path: Path) -> None:
    """Draws both pictures, one part for each network that has figures.

    Args:
        results: One for each row and network.
        time_path: PNG file for the seconds an epoch.
        accuracy_path: PNG file for the test accuracy over the seconds of training.
    """
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    shown = [one for one in results if one.epochs and not one.problem]
    networks = list(dict.fromkeys(one.network for one in shown))
    for path, part in ((time_path, _times), (accuracy_path, _accuracies)):
        size = (6 * max(1, len(networks)), 4)
        figure = Figure(figsize=size, layout="constrained")
        for place, network in enumerate(networks, start=1):
            axes = figure.add_subplot(1, len(networks), place)
            axes.set_title(_TITLES[network])
            part(axes, ranked([one for one in shown if one.network == network]))
        figure.savefig(path, dpi=120, format="png")


def _times(axes: Any, results: Sequence[Result]) -> None:
    places = range(len(results))
    axes.barh(
        places,
        [one.seconds for one in results],
        xerr=[one.deviation or 0.0 for one in results],
        color=[_COLOURS[one.row.name] for one in results],
        ecolor="0.3",
    )
    axes.set_yticks(places, [one.row.name for one in results])
    axes.invert_yaxis()
    axes.bar_label(axes.containers[1], [f" {one.seconds:,.1f}" for one in results])
    axes.margins(x=0.15)
    axes.set_xlabel("seconds an epoch: mean and standard deviation")


def _accuracies(axes: Any, results: Sequence[Result]) -> None:
    for result in results:
        first = [epoch for epoch in result.epochs if epoch.run == 0]
        if any(epoch.accuracy is None for epoch in first):
            continue
        axes.plot(
            list(itertools.accumulate(epoch.seconds for epoch in first)),
            [100 * epoch.accuracy for epoch in first],
            marker="o",
            markersize=3,
            color=_COLOURS[result.row.name],
            label=result.row.name,
        )
    if axes.lines:
        axes.legend(fontsize="small")
    axes.set_xlabel("seconds of training, the first run's")
    axes.set_ylabel("test accuracy, %")
