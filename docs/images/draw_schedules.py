"""Draws `schedules.svg`: the learning rate of each schedule over a run.

    python docs/images/draw_schedules.py

It needs matplotlib, which the extra `report` brings.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from cifar10.towers import schedule

OUTPUT = Path(__file__).with_name("schedules.svg")

EXAMPLES = 1000  # Of the whole run; the curves are the same for any number.
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def of_curve(curve: schedule.Curve) -> schedule.Schedule:
    """Returns the rate of a curve by default, as a share of the highest."""
    examples = 0.4 * EXAMPLES if curve.period else EXAMPLES
    given = {name: default for name, (default, *_) in curve.parameters.items()}
    given.pop(curve.period, None)
    return lambda seen: curve.function(tf.cast(seen, tf.float64) / examples, **given)


CURVES = {
    name: (of_curve(curve), colour, "-")
    for (name, curve), colour in zip(schedule.CURVES.items(), cycle(COLOURS))
}
CURVES["cosine with a warm-up"] = (
    partial(schedule.warmed_up, CURVES["cosine"][0], 100.0, 1),
    CURVES["cosine"][1],
    ":",
)


def draw() -> None:
    """Writes the picture; with one version of matplotlib it is always the same."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    seen = np.arange(EXAMPLES + 1)
    for name, (rate, colour, line) in CURVES.items():
        axes.plot(seen / EXAMPLES, rate(seen), line, color=colour, label=name)
    axes.set_xlabel("part of the training")
    axes.set_ylabel("learning rate, of the highest")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    with mpl.rc_context({"svg.hashsalt": "schedules", "svg.fonttype": "none"}):
        figure.savefig(OUTPUT, metadata={"Date": None})


if __name__ == "__main__":
    draw()
