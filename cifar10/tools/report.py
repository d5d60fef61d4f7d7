"""`python -m cifar10 report`: reports on runs in one self-contained HTML file.

Paths and names of classes are not trusted: all text but this package's is escaped.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10 import files
from cifar10.config import fields, flags, layout, run_options
from cifar10.config.python_objects import METRICS
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, printable, rounded, say
from cifar10.models.step_metrics import STEP_METRICS
from cifar10.process import entry_point, invocation
from cifar10.run_directory.seeds import grouped

if TYPE_CHECKING:
    from cifar10.tools.report_run import ReportedRun

HELP = "write one page on one or several runs: curves, mistakes, checkpoints"
DESCRIPTION = """Writes one page on one or several runs.

    python -m cifar10 report --train_dir runs/cifar10_train
    python -m cifar10 report runs/one runs/another --output both.html
    python -m cifar10 report runs/*

The page, a single HTML file without scripts, shows settings and how they differ,
curves, the confusion matrix and the hardest images of a checkpoint (the newest,
or --step) on the test set, and the mean of runs that differ only in their seeds.
Overwrites an earlier report, but no other file. Needs the extra `report`.
"""

# The first lines of a report, which distinguish it from other files.
MARK = "<!doctype html>\n<!-- A report of python -m cifar10 report. -->\n"
_FLAG = "--output"

# The settings to show first.
_MAIN = (
    *("model", "parameters", "data_description", "distortions", "devices", "towers"),
    *("precision", "global_batch_size", *fields.LENGTHS, "optimizer", "learning_rate"),
    "seed",
)
# Settings that are shown elsewhere on the page, or would fill it.
_ELSEWHERE = (
    *("train_dir", "versions", "class_names", "earlier_sessions", "metrics"),
    *("model_logits", "data_sample", "data_uncorrected"),
)


@dataclasses.dataclass(frozen=True)
class Options(run_options.RunOptions):
    """Which runs to report on, and where to write the page.

    Attributes:
        run_dirs: directories of runs
        output: file of the page (default: report.html, in the folder of a single run)
        data_dir: directory of the data set (default: the run's)
    """

    run_dirs: Sequence[str] = ()
    _: dataclasses.KW_ONLY
    output: str | None = None
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ending = Path(self.output or "").suffix.lower()
        if ending not in ("", ".html", ".htm") and ending[1:].isalpha():
            why = f"{_FLAG} {self.output}: the page is an HTML file"
            raise UsageError(f"{why}. Let its name end in .html.")


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    several: Any = {"metavar": "S", "action": "append", "default": []}
    what = "directory of a run"
    parser.add_argument("run_dirs", nargs="*", metavar="RUN_DIR", help=what)
    parser.add_argument("--train_dir", "--checkpoint_dir", help=what, **several)
    flags.add_flags(parser, Options, {"step", "trust_model", "output", "data_dir"})
    given = flags.parse(parser, words)
    invocation.require_packages("report", "jinja2", "matplotlib")
    names = [*given.pop("run_dirs"), *given.pop("train_dir")] or [fields.TRAIN_DIR]
    options = Options(_of_runs(names), **given)
    entry_point.import_tensorflow()
    write_report(options)
    return 0


def _of_runs(names: Sequence[str]) -> list[str]:
    """Returns the directories that hold runs; says which do not, if any does."""
    problems = {}
    for name in names:
        try:
            RecordedRun.read(layout.absolute_path(name))
        except UsageError as error:
            problems[name] = error
    if len(problems) == len({*names}):
        raise next(iter(problems.values()))
    for problem in problems.values():
        say(f"Left out: {problem}")
    return [name for name in names if name not in problems]


def write_report(options: Options) -> None:
    """Reads the runs, scores a checkpoint of each, and writes the report."""
    from cifar10.evaluation import metrics
    from cifar10.tools.report_run import read_runs
    from cifar10.towers import devices

    runs = read_runs([*map(layout.absolute_path, options.run_dirs)])
    folder = runs[0].path if len(runs) == 1 else "."
    output = layout.absolute_path(options.output or f"{folder}/report.html")
    _check_replaceable(output)
    device = devices.place_evaluation("auto")
    for run in runs:
        if run.saved:
            try:
                run.score(device, options.step, options.trust_model, options.data_dir)
            except UsageError as error:
                run.notes.append(f"No checkpoint was scored. {error}")
    # The name of a folder need not be UTF-8.
    html = (MARK + render(runs, time.time())).encode(errors="backslashreplace")
    files.write_output(output, _FLAG, html)
    for run in runs:
        for note in run.notes:
            say(f"{printable(run.name)}: {note}")
        if scores := run.scores:
            classes = len(scores.class_names)
            result = metrics.headline(run.tested, scores.sums.count, classes)
            print(f"{printable(run.name)}, step {run.tested['step']}: {result}")
    print(f"Open {output}")


def _check_replaceable(path: Path) -> None:
    """Refuses an output path that holds anything but an earlier report."""
    with files.writing(path, _FLAG):
        path.parent.stat()
        if not path.exists():
            return
        with files.opened(path) as file:
            if MARK.encode() in file.read(256):
                return
    why = f"{_FLAG} {path} already exists and is not a report"
    raise UsageError(f"{why}. Name another path.")


def render(runs: Sequence[ReportedRun], now: float) -> str:
    """Renders the page as HTML; `now` is the time that it shows, as Unix time."""
    import jinja2

    from cifar10.run_directory.scores import interval
    from cifar10.tools.report_curves import COLOURS, draw

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=strict)
    environment.globals |= {"draw": draw, "interval": interval, "rounded": rounded}
    environment.filters |= {
        "own_metrics": lambda lines: sorted(
            {name for line in lines for name in line if name.startswith(METRICS)}
        ),
        "thousands": "{:,}".format,
        "date": lambda at: time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(at)),
    }
    seeds = grouped((run.name, run.recorded, *run.headline) for run in runs)
    return environment.get_template("report.html").render(
        runs=runs,
        rows=_compare(runs),
        seeds=seeds if any(row.interval for row in seeds) else [],
        colours=COLOURS,
        largest_matrix=20,  # Classes; a larger confusion matrix is left out.
        now=now,
        metrics=STEP_METRICS,
    )


def _compare(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Returns a row per setting, with its value in each run as text."""
    settings = [{**run.recorded.facts.versions, **run.recorded.entries} for run in runs]
    rows = []
    for name in dict.fromkeys([*_MAIN, *(name for each in settings for name in each)]):
        if name in _ELSEWHERE:
            continue
        values = [each.get(name) for each in settings]
        differs = any(value != values[0] for value in values)
        is_main = differs or (name in _MAIN and values[0] is not None)
        values = ["open" if value == fields.OPEN_STEPS else value for value in values]
        texts = [f"{value:,}" if type(value) is int else value for value in values]
        row = {"title": name.replace("_", " "), "texts": texts}
        rows.append({**row, "differs": differs, "is_main": is_main})
    return rows
