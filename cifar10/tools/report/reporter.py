"""Reads runs, scores a checkpoint of each, and writes the page."""

import time

from cifar10.config import paths
from cifar10.errors import UsageError, say
from cifar10.evaluation import metrics
from cifar10.run_directory.scores import comparable
from cifar10.tools import packages
from cifar10.tools.report import page, run as run_files, scored
from cifar10.tools.report.options import Options
from cifar10.towers import devices


def run(options: Options) -> None:
    """Writes the report."""
    packages.require("report", "jinja2", "matplotlib")
    runs = run_files.read_all([paths.locate_run(name) for name in options.directories])
    folder = runs[0].path if len(runs) == 1 else "."
    output = paths.locate(options.output or f"{folder}/report.html")
    page.check_output(output)
    device = devices.place_evaluation(options.device)
    scores = [_score(run, options, device) for run in runs]
    page.write(output, runs, scores, time.time())
    for run, score in zip(runs, scores, strict=True):
        for note in run.notes:
            say(metrics.LINES.fill(f"{run.name}: {note}"))
        if score:
            precision = score.scalars["precision @ 1"]
            result = metrics.headline(precision, len(score.class_names), {})
            print(f"{run.name}, step {score.step}: {result}")
    print(f"Open {output}")


def _score(run: run_files.Run, options: Options, device: str) -> scored.Scores | None:
    """Scores a run if possible; otherwise a note says why not."""
    if not options.evaluate:
        run.notes.append("Not scored for this report, because of --no-evaluate.")
        return None
    if not run.saved:
        return None
    try:
        found = scored.score(
            run, device, options.data_dir, options.trust_model, options.step
        )
    except UsageError as error:
        run.notes.append(f"No checkpoint was scored. {error}")
        return None
    line = {"step": found.step, "num_examples": found.sums.count, **found.scalars}
    run.scored = [*comparable([*run.scored, line], found.sums.count).values()]
    return found
