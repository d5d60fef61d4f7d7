"""Draws `tutorial.svg`: the accuracy of the recipe `tutorial`, with eval.py beside it.

    python docs/images/draw_tutorial.py RUN

It needs matplotlib, which the extra `report` brings.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from cifar10.run_directory import scores

OUTPUT = Path(__file__).with_name("tutorial.svg")
# What the tutorial reports: at most 86 % in 100,000 steps, its table from 30,000 on.
TUTORIAL = {30_000: 0.84, 60_000: 0.86, 100_000: 0.86}


def draw(run: Path) -> None:
    """Writes the picture; with one version of matplotlib it is always the same."""
    found = scores.deciding(run).values
    steps = sorted(found)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [found[step] for step in steps], color="#0072B2", label="this run")
    axes.plot(
        *zip(*TUTORIAL.items(), strict=True), "o", color="#D55E00", label="tutorial"
    )
    axes.set_xlabel("steps of 128 images")
    axes.set_ylabel("accuracy on the test images")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_ylim(0.6, 0.9)
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    with mpl.rc_context({"svg.hashsalt": "tutorial", "svg.fonttype": "none"}):
        figure.savefig(OUTPUT, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
