"""Reads runs, scores their newest checkpoints, and writes the page."""

from __future__ import annotations

import sys
import time

from cifar10.config import paths
from cifar10.errors import UsageError
from cifar10.tools import packages
from cifar10.tools.report import page, run as run_files, scored
from cifar10.tools.report.options import Options
from cifar10.towers import devices


def run(options: Options) -> None:
    """Writes the report."""
    packages.require("report", "jinja2", "matplotlib")
    output = paths.locate(options.output)
    page.check_output(output)
    runs = run_files.read_all([paths.locate_run(name) for name in options.directories])
    device = devices.place_evaluation(options.device)
    scores = [_score(run, options, device) for run in runs]
    page.write(output, runs, scores, time.time())
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    print(f"The report is in {output}")


def _score(run: run_files.Run, options: Options, device: str) -> scored.Scores | None:
    """Scores a run if possible; otherwise a note says why not."""
    if not options.evaluate:
        run.notes.append("Not scored for this report, because of --no-evaluate.")
        return None
    if not run.saved:
        return None
    try:
        return scored.score(run, device, options.data_dir)
    except UsageError as error:
        run.notes.append(f"The newest checkpoint was not scored. {error}")
        return None
