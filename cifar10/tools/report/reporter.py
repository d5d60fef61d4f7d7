"""Reads runs, scores their newest checkpoints, and writes the page."""

from __future__ import annotations

import importlib.util
import sys
import time

from cifar10.errors import UsageError
from cifar10.run_directory import layout
from cifar10.tools.report import page, run as runs_of, scored
from cifar10.tools.report.options import Options
from cifar10.towers import devices

_PACKAGES = ("jinja2", "matplotlib")


def run(options: Options) -> None:
    """Writes the report.

    Raises:
        UsageError: A directory holds no run, or the page cannot be written.
    """
    missing = [name for name in _PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"The report needs {' and '.join(missing)}, which cannot be imported. "
            "Install with pip install -c constraints.txt -e '.[report]'."
        )
    output = layout.locate(options.output)
    page.check_output(output)
    runs = runs_of.read_all([layout.locate(name) for name in options.run_dirs])
    device = devices.place_evaluation(options.device)
    scores = [_scores(one, options, device) for one in runs]
    page.write(output, runs, scores, time.time())
    for one in runs:
        for note in one.notes:
            print(f"{one.name}: {note}", file=sys.stderr)
    print(f"The report is in {output}")


def _scores(one: runs_of.Run, options: Options, device: str) -> scored.Scores | None:
    """Scores a run if it can be; the report says why where it cannot."""
    if not options.evaluate:
        one.notes.append("Not scored for this report, as --no-evaluate asks.")
        return None
    if not one.saved:
        return None
    try:
        return scored.score(one, device, options.data_dir)
    except UsageError as error:
        one.notes.append(f"The newest checkpoint was not scored. {error}")
        return None
