"""Writes the page: one HTML file that needs nothing else.

Paths and names of classes may come from anywhere, so all text is escaped, except this
package's own style and curves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from cifar10.config import layout
from cifar10.config.run_config import IS_OWN
from cifar10.errors import UsageError, say
from cifar10.evaluation import metrics
from cifar10.tools import outputs
from cifar10.tools.report import curves
from cifar10.tools.report.run import Run, read_runs
from cifar10.towers import devices

if TYPE_CHECKING:
    from cifar10.tools.report.command import Options

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


def write_report(options: Options) -> None:
    """Reads the runs, scores a checkpoint of each, and writes the page."""
    runs = read_runs([layout.locate_run(name) for name in options.directories])
    folder = runs[0].path if len(runs) == 1 else "."
    output = layout.absolute_path(options.output or f"{folder}/report.html")
    outputs.check(output, _FLAG, "report", MARK)
    device = devices.place_evaluation(options.device)
    for run in runs:
        _score(run, options, device)
    # The name of a folder need not be UTF-8.
    html = (MARK + render(runs, time.time())).encode(errors="backslashreplace")
    outputs.write(output, _FLAG, html)
    for run in runs:
        for note in run.notes:
            say(f"{run.name}: {note}")
        if scores := run.scores:
            precision = scores.scalars["precision @ 1"]
            result = metrics.headline(precision, len(scores.class_names), {})
            print(f"{run.name}, step {scores.step}: {result}")
    print(f"Open {output}")


def _score(run: Run, options: Options, device: str) -> None:
    """Scores a run if possible; otherwise a note says why not."""
    if not options.evaluate:
        run.notes.append("Not scored for this report, because of --no-evaluate.")
    elif run.saved:
        try:
            run.score(device, options.data_dir, options.trust_model, options.step)
        except UsageError as error:
            run.notes.append(f"No checkpoint was scored. {error}")


def render(runs: Sequence[Run], now: float) -> str:
    """Returns the page of a time, in seconds since 1970, without its first lines."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
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
        runs=runs,
        charts=_charts(runs),
        rows=_compare(runs),
        colours=curves.COLOURS,
        largest_matrix=metrics.LARGEST_MATRIX,
        now=now,
    )


def _charts(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the charts by name, as SVG."""
    logs, draw = [run.logged for run in runs], curves.draw
    losses = ["total_loss/average", "total_loss"]
    scored = [run.scored for run in runs]
    rates, throughput = ["learning_rate"], ["examples_per_sec"]
    return {
        "loss": draw("loss", logs, losses, "{x:g}", leave_out_jumps=True),
        "accuracy": draw("accuracy", scored, ["precision @ 1"], "{x:.1%}"),
        "throughput": draw("throughput", logs, throughput, "{x:,.0f}", from_zero=True),
        "rate": draw("rate", logs, rates, "{x:g}", from_zero=True),
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
