"""Writes the page: what was read and scored, as one HTML file that needs nothing else.

Paths and names of classes come from wherever a run comes from, so all text is escaped;
only this package's own style and curves are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError, reason
from cifar10.evaluation import metrics
from cifar10.tools.report import configuration, curves
from cifar10.tools.report.run import Run, curve
from cifar10.tools.report.scored import Scores

_FOLDER = Path(__file__).parent
# What a report begins with, so that one is known from a file that is something else.
MARK = "<!doctype html>\n<!-- A report of python -m cifar10 report. -->\n"
# Mistakes are fewer than hits: this part of a class is as dark as all of it on the
# diagonal.
_DARKEST_MISTAKE = 0.3
# Charts whose values are amounts: half as high is half as much.
_FROM_ZERO = ("throughput", "rate")


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with its title; without a value to draw, `svg` is empty."""

    title: str
    unit: str
    svg: str
    absent: str


def check_output(path: Path) -> None:
    """Refuses to replace what is no report, before any work is done.

    Raises:
        UsageError: Something else is there, or there is no such folder.
    """
    # Not `Path.is_dir`: it fails where this user may not look.
    if not os.path.isdir(path.parent):  # noqa: PTH112
        raise UsageError(
            f"--output {path}: there is no folder {path.parent}. Make it, or name "
            "another place."
        )
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            known = file.read(len(MARK)) == MARK
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from error
    if not known:
        raise UsageError(
            f"--output {path} is there already and is no report. Name another place, "
            "or move it away."
        )


def write(
    path: Path, runs: Sequence[Run], scored: Sequence[Scores | None], now: float
) -> None:
    """Writes the page; an earlier report is replaced when the new one is whole.

    Args:
        path: The file.
        runs: The runs.
        scored: What their newest checkpoints know; None for one that was not scored.
        now: Seconds since 1970.

    Raises:
        UsageError: It cannot be written.
    """
    html = MARK + render(runs, scored, now)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        # The name of a folder need not be UTF-8.
        temporary.write_text(html, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def render(runs: Sequence[Run], scored: Sequence[Scores | None], now: float) -> str:
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
        "percent": _percent,
        "whole_percent": lambda part: _percent(part, 0),
        "hundredths": lambda part: _percent(part, 0).rstrip("\N{NO-BREAK SPACE}%"),
        "thousands": _thousands,
        "megabytes": lambda size: f"{size / 1e6:,.1f} MB",
        "moment": _moment,
        "age": lambda written: _age(now - written),
    }
    main, rest = configuration.compare(runs)
    return environment.get_template("page.html").render(
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        runs=[
            {"run": run, "scores": own, "figures": _figures(run, own)}
            for run, own in zip(runs, scored, strict=True)
        ],
        charts=_charts(runs),
        main=main,
        rest=rest,
        colours=curves.COLOURS,
        largest_matrix=metrics.LARGEST_MATRIX,
        shade=_shade,
        now=now,
    )


def _figures(run: Run, scores: Scores | None) -> dict[str, Any]:
    """Returns what a run's card says; None where there is no such number."""
    best = max(run.scored, key=lambda line: line["precision @ 1"], default=None)
    return {
        "last": run.logged[-1] if run.logged else None,
        "rate": run.rate,
        "best": best,
        "newest": run.scored[-1] if run.scored else None,
        "scores": scores,
    }


def _charts(runs: Sequence[Run]) -> list[Chart]:
    def of_training(metric: str, *, faint: bool = False) -> list[curves.Series]:
        return [curves.Series(r.number, *r.curve(metric), faint) for r in runs]

    averaged = of_training("total_loss/average")
    has_average = any(one.steps for one in averaged)
    loss = of_training("total_loss", faint=has_average) + averaged
    accuracy = [
        curves.Series(run.number, *curve(run.scored, "precision @ 1")) for run in runs
    ]
    nothing = "The training has logged nothing yet."
    rows = [
        ("loss", "Loss", "total, and its moving average", loss, _plain, nothing),
        (
            "accuracy",
            "Accuracy",
            "precision @ 1 on the test set, by eval.py",
            accuracy,
            lambda part: f"{part:.0%}",
            "eval.py has scored no checkpoint yet.",
        ),
        (
            "throughput",
            "Throughput",
            "images a second, all towers",
            of_training("examples_per_sec"),
            lambda rate: f"{rate:,.0f}",
            nothing,
        ),
        ("rate", "Learning rate", "", of_training("learning_rate"), _plain, nothing),
    ]
    return [
        Chart(
            title,
            unit,
            curves.draw(name, title, series, form, from_zero=name in _FROM_ZERO),
            absent,
        )
        for name, title, unit, series, form, absent in rows
    ]


def _plain(value: float) -> str:
    return f"{value:g}"


def _shade(scores: Scores, row: int, column: int) -> int:
    """Returns how dark a cell of the confusion matrix is, in percent."""
    confusion = scores.sums.confusion
    part = confusion[row, column] / max(1, confusion[row].sum())
    if row != column:
        part = min(1.0, part / _DARKEST_MISTAKE)
    return round(100 * float(part))


def _thousands(number: float) -> str:
    # An integer may be beyond all floats.
    return f"{number:,}" if isinstance(number, int) else f"{number:,.0f}"


def _percent(part: float | None, digits: int = 2) -> str:
    """Returns a part in percent, not to be torn from its sign; none has none."""
    return "-" if part is None else f"{100 * part:.{digits}f}\N{NO-BREAK SPACE}%"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _age(seconds: float) -> str:
    """Returns a time span in its largest unit, as in `3 hours`."""
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count:,} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--output {path} cannot be written: {reason(error)}. Make room there and make "
        "it writable, or name another place."
    )
