"""Writes the page: one HTML file that needs nothing else.

Paths and names of classes may come from anywhere, so all text is escaped, except this
package's own style and curves.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar10.config.origin import IS_OWN
from cifar10.evaluation import metrics
from cifar10.tools import outputs
from cifar10.tools.report import curves
from cifar10.tools.report.run import Run
from cifar10.tools.report.scored import Scores

_FOLDER = Path(__file__).parent
# The first lines of a report, which distinguish it from other files.
MARK = "<!doctype html>\n<!-- A report of python -m cifar10 report. -->\n"
_FLAG = "--output"

# The settings to show first, with their titles.
_MAIN = {
    "model": "model",
    "parameters": "parameters",
    "data_description": "data",
    "distortions": "distortions",
    "devices": "devices",
    "towers": "towers",
    "precision": "precision",
    "global_batch_size": "global batch size",
    "max_steps": "steps",
    "optimizer": "optimizer",
    "learning_rate": "learning rate",
    "seed": "seed",
}
# Settings that are shown elsewhere on the page.
_ELSEWHERE = ("train_dir", "versions", "class_names", "earlier_sessions", IS_OWN)


def check_output(path: Path) -> None:
    """Refuses to overwrite anything but a report, before any work is done."""
    outputs.check(path, _FLAG, "report", MARK)


def write(
    path: Path, runs: Sequence[Run], scores: Sequence[Scores | None], now: float
) -> None:
    """Writes the page; an earlier report is replaced once the new one is complete.

    A run whose newest checkpoint was not scored has None for its scores.
    """
    html = MARK + render(runs, scores, now)
    # The name of a folder need not be UTF-8.
    outputs.write(path, _FLAG, html.encode(errors="backslashreplace"))


def render(runs: Sequence[Run], scores: Sequence[Scores | None], now: float) -> str:
    """Returns the page without its first lines."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "thousands": "{:,}".format,
        "date": lambda seconds: time.strftime(
            "%Y-%m-%d %H:%M %Z", time.localtime(seconds)
        ),
    }
    return environment.get_template("page.html").render(
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        runs=list(zip(runs, scores, strict=True)),
        charts=_charts(runs),
        rows=_compare(runs),
        colours=curves.COLOURS,
        largest_matrix=metrics.LARGEST_MATRIX,
        now=now,
    )


def _charts(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the charts by name, as SVG."""
    logged = [run.logged for run in runs]
    scored = [run.scored for run in runs]
    losses = ["total_loss/average", "total_loss"]
    draw, from_zero = curves.draw, functools.partial(curves.draw, from_zero=True)
    return {
        "loss": draw("loss", logged, losses, "{x:g}", leave_out_jumps=True),
        "accuracy": draw("accuracy", scored, ["precision @ 1"], "{x:.1%}"),
        "throughput": from_zero("throughput", logged, ["examples_per_sec"], "{x:,.0f}"),
        "rate": from_zero("rate", logged, ["learning_rate"], "{x:g}"),
    }


def _compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns a row per setting, with its value in each run as text."""
    versions = {name for run in runs for name in run.settings.get("versions", {})}
    settings = [run.settings | run.settings.get("versions", {}) for run in runs]
    rows = []
    for name in dict.fromkeys([*_MAIN, *(name for each in settings for name in each)]):
        if name not in _ELSEWHERE:
            values = [each.get(name, "not recorded") for each in settings]
            differs = any(value != values[0] for value in values)
            row = {
                "title": _MAIN.get(name, name),
                "texts": [_text(value) for value in values],
                "differs": differs,
                "is_main": differs or name in _MAIN or name in versions,
            }
            rows.append(row)
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value)
