"""`python -m cifar10 runs`: lists the runs below a directory, and removes some."""

import argparse
import bisect
import contextlib
import csv
import io
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.config import flags, layout
from cifar10.config.fields import PRECISION, RECORDED
from cifar10.config.options import is_a, options
from cifar10.config.run_config import RecordedRun
from cifar10.config.schema import EVENT
from cifar10.errors import UsageError, counted, printable, reason, say
from cifar10.run_directory import checkpoints, logs, scores, seeds, starting
from cifar10.run_directory.averages import divergence
from cifar10.run_directory.early_stopping import why_ended
from cifar10.run_directory.lock import RunLock, explaining_errors, is_locked

HELP = "list runs with their state, step, score, size and age; remove some"
DESCRIPTION = """Lists the runs in and below a directory.

    python -m cifar10 runs
    python -m cifar10 runs runs --prune photos.1 trials/wide --yes

The state of a run is `training` while a process trains it; `finished` at the
last step, or if the score no longer rose; `diverged` if it finished, but the model
only guesses; `stopped` if training ended earlier, with a checkpoint of its last
step; `failed` if that checkpoint is older; `damaged` if files cannot be read.
"""
# Either is in a run's directory, the second even if the first is lost.
_HELD_BY_RUNS = {layout.CONFIG, layout.STARTS}
# Files whose newest change dates a run. Any command may write other files.
_OF_A_TRAINING = (layout.CONFIG, layout.METRICS, checkpoints.MANIFEST)
# By the flag --sort; best scores and newest runs come first.
_ORDERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "name": lambda _: 0,  # As they are found.
    "state": lambda run: run["state"],
    "age": lambda run: -run["changed"],
    "size": lambda run: -run["bytes"],
    "score": lambda run: -((run.get("scores") or {}).get(PRECISION, -1.0)),
}
_PRUNE = "list the named (or --older_than) runs for removal; with --yes, remove them"
_KEEP = "with --prune, remove all checkpoints of finished runs but the best"
_AGE = "only runs unchanged for this long: 30d (days) or 12h (hours)"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    place = "directory of runs (default: runs)"
    parser.add_argument("DIR", nargs="?", default="runs", help=place)
    parser.add_argument("--prune", nargs="*", metavar="NAME", help=_PRUNE)
    parser.add_argument("--keep", choices=["best"], help=_KEEP)
    parser.add_argument("--older_than", metavar="AGE", type=_hours, help=_AGE)
    parser.add_argument("--yes", action="store_true", help="remove what --prune lists")
    parser.add_argument("--json", action="store_true", help="print JSON, a list")
    parser.add_argument("--csv", action="store_true", help="print a table as CSV")
    by = "order of the list (default: name)"
    parser.add_argument("--sort", choices=_ORDERS, default="name", help=by)
    given = flags.parse(parser, words)
    _check(given)
    directory = layout.absolute_path(given["DIR"])
    try:
        runs = find_runs(directory)
    except RecursionError as error:  # Up to Python 3.11, `os.walk` is recursive.
        why = "holds a thousand nested folders. Remove them."
        raise UsageError(f"{directory} {why}") from error
    names, keep, age = given["prune"], given["keep"], given["older_than"]
    if age is not None:
        limit = time.time() - 3600 * age
        runs = {name: run for name, run in runs.items() if run["changed"] <= limit}
    if names is not None:
        runs = _to_prune(runs, [*map(os.path.normpath, names)], keep)
    runs = dict(sorted(runs.items(), key=lambda item: _ORDERS[given["sort"]](item[1])))
    named = [{"name": name, **run} for name, run in runs.items()]
    if given["json"]:
        print(logs.as_json(named))
    elif given["csv"]:
        _print_table(named)
    else:
        _print(runs, directory)
    if names is not None and not given["yes"]:
        what = "all but these runs' best checkpoints" if keep else "these directories"
        say(f"Nothing was removed. --yes removes {what} for good.")
    elif names is not None:
        _prune_all(runs.values(), keep)
    return 0


def _check(given: Mapping[str, Any]) -> None:
    """Refuses flags that say nothing together."""
    for name in [name for name in ("keep", "yes") if given[name]]:
        if given["prune"] is None:
            raise UsageError(f"--{name} needs --prune.")
    if given["json"] and given["csv"]:
        raise UsageError("--json and --csv cannot be combined. Omit one.")
    if given["prune"] == [] and given["older_than"] is None:
        raise UsageError("--prune: name the runs, or give --older_than 30d.")


def find_runs(directory: Path) -> dict[str, dict[str, Any]]:
    """Finds the runs in and below a directory; maps relative paths to JSON values.

    Each run has `path`, `bytes`, `state`, and `changed`: the time of its newest
    checkpoint or log line in seconds since 1970. A damaged run has a `problem`, others
    have `step`, `best`, `starts`, `max_steps` (null with --max_hours), `settings` from
    config.json, the last `event`, and `scores` on the split `scored`. Follows no links.
    """
    if not os.path.isdir(directory):  # noqa: PTH112 - `Path.is_dir` raises.
        raise UsageError(f"{directory} is not a directory. Name one that holds runs.")
    found = {}

    def skip(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # Moved by a run.
            say(f"Note: {printable(str(error.filename))} is left out: {reason(error)}.")

    for folder, inner, names in os.walk(directory, onerror=skip):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if _HELD_BY_RUNS & {*names} and (run := _read(Path(folder))):
            found[os.path.relpath(folder, directory)] = run
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the run in a directory, or None if another program made `config.json`."""
    size, changed = 0, 0.0
    for folder, inner, names in os.walk(path):
        if _HELD_BY_RUNS & {*names} and folder != str(path):
            inner.clear()  # Another run, which has its own entry.
            continue
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # Deleted by a training run.
                file = Path(folder, name).lstat()
                size += file.st_size
                if name in _OF_A_TRAINING:
                    changed = max(changed, file.st_mtime)
    try:
        progress = _progress(RecordedRun.read(path))
    except (UsageError, FileNotFoundError) as error:
        if not any(path.glob(f"{layout.CHECKPOINTS}/step-*")):
            return None
        progress = {"state": "damaged", "problem": " ".join(str(error).split())}
    return {"path": str(path), "bytes": size, "changed": changed, **progress}


def _progress(run: RecordedRun) -> dict[str, Any]:
    """Returns a run's state, steps, scores, starts, settings and last event."""
    path, limits = run.directory, run.config.run
    saved = checkpoints.steps(path / layout.CHECKPOINTS)
    starts = starting.read_starts(path)
    lines = [*_counting(logs.read_recent(path / layout.METRICS), starts)]
    logged = [line["step"] for line in lines if "event" not in line]
    # A run that ends at a loss of NaN or infinity saves the state before that step.
    debugged = checkpoints.steps(path / layout.DEBUG_CHECKPOINTS)
    step = max([0, *logged, *saved, *debugged])
    split, by, images, values = scores.deciding(path)
    best: dict[str, Any] | None = None
    for at in scores.ranked(values, by)[:1]:
        best = {"part": split, "by": by, "score": values[at], "step": at}
        best["images"] = images
    state = "stopped" if saved[-1:] == [step] else "failed"
    if saved:
        manifest = checkpoints.read_manifest(path / layout.CHECKPOINTS, saved[-1])
        for name, value in run.config.identity.items():
            if (there := manifest.get(name)) != value:
                why = f"its {name} is {there}, but {value} in config.json"
                raise UsageError(f"the checkpoint of step {saved[-1]}: {why}")
        if why_ended(run.config, manifest) or (path / layout.PRUNED).exists():
            averages = manifest.get(checkpoints.AVERAGES, {})
            lost = divergence(run.config, averages) or checkpoints.was_diverged(path)
            state = "diverged" if lost else "finished"
    state = "training" if is_locked(path) else state
    last = None if limits.max_hours else limits.max_steps
    numbers = {"step": step, "max_steps": last, "best": best}
    split, line = seeds.last_scores(run)
    found = {"settings": run.entries, "scored": split, "scores": line}
    numbers |= {"event": [None, *logs.intact(lines, EVENT)][-1], "starts": starts}
    return {"state": state, **numbers, **found}


def _counting(
    lines: Iterable[dict[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yields the lines of a log but for steps that a later start computes again."""
    times, steps = ([one[name] for one in starts[1:]] for name in ("time", "step"))
    lowest = [*itertools.accumulate(steps[::-1], min)][::-1]
    for line in lines:
        then = line.get("time")
        later = bisect.bisect_right(times, then) if is_a(then, float) else len(times)
        again = line["step"] > min(lowest[later : later + 1], default=math.inf)
        if not again or line.get("event") == "silence":
            yield line


def _print(runs: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
    width = max((len(printable(name)) for name in runs), default=0)
    for name, run in runs.items():
        said = run.get("problem") or f"step {run['step']:,}"
        if run.get("max_steps"):
            said += f" of {run['max_steps']:,}"
        if best := run.get("best"):
            score = scores.shown(best["by"], best["score"], best["images"])
            said += f", best {score} on {best['part']} at step {best['step']:,}"
        if len(starts := run.get("starts", ())) > 1:
            said += f", {len(starts)} starts, the last from step {starts[-1]['step']:,}"
        if change := run.get("settings", {}).get("what_if", {}).get("change"):
            said += f", {change}"
        if event := run.get("event"):
            said += f", {event['event']} at step {event['step']:,}"
        size = f"{run['bytes'] / 1e6:,.1f} MB"
        age = f"{timedelta(seconds=int(max(0.0, time.time() - run['changed'])))} ago"
        start = f"{printable(name):{width}}  {run['state']:8}  {size:>10}  {age:>15}"
        print(f"{start}  {printable(said)}")
    for one in seeds.grouped(
        (name, RecordedRun.of(directory, run["settings"]), run["scored"], run["scores"])
        for name, run in runs.items()
        if run.get("scores")
    ):
        if one.interval:
            names = ", ".join([*one.names, *(f"not {name}" for name in one.left_out)])
            print(f"{one}: {printable(names)}")
    size = f"{sum(run['bytes'] for run in runs.values()) / 1e6:,.1f} MB"
    print(f"{counted(len(runs), 'run')} in {printable(str(directory))}, {size}")


def _print_table(runs: Sequence[Mapping[str, Any]]) -> None:
    first = ("name", "state", "step", "scored")
    scored = [{k: run.get(k) for k in first} | run.get("scores", {}) for run in runs]
    groups = [[*map(_plain, scored)], [_plain(run.get("settings", {})) for run in runs]]
    columns = dict.fromkeys(name for group in groups for one in group for name in one)
    rows = [{**settings, **scores} for scores, settings in zip(*groups, strict=True)]
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    # A name that is not UTF-8 would end every reader of the table.
    print(text.getvalue().encode(errors="backslashreplace").decode(), end="")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes tables of the configuration as JSON; leaves out other lists and dicts."""
    tables, known = (list, dict), options(RECORDED)
    return {
        name: json.dumps(value) if isinstance(value, tables) else value
        for name, value in values.items()
        if name in known or not isinstance(value, tables)
    }


def _hours(age: str) -> int:
    if found := re.fullmatch("([0-9]{1,6})([dh])", age):
        return int(found[1]) * (24 if found[2] == "d" else 1)
    raise UsageError(f"--older_than {age}: give days or hours, such as 30d or 12h.")


def _to_prune(
    runs: Mapping[str, dict[str, Any]], names: list[str], keep: str | None
) -> dict[str, dict[str, Any]]:
    """Returns the runs that are named, or all that may be pruned if none is."""
    whys = {name: _why_not(runs.get(name), keep) for name in names or runs}
    for name in names:
        if whys[name]:
            raise UsageError(f"--prune {name}: {whys[name]}")
    return {name: runs[name] for name, why in whys.items() if not why}


def _why_not(run: Mapping[str, Any] | None, keep: str | None) -> str:
    """Returns why a run is not to be pruned; "" if it is."""
    if run is None:
        return "there is no run with this name and age."
    path = Path(run["path"])
    inner = (at for at, _, names in os.walk(path) if _HELD_BY_RUNS & {*names})
    if run["state"] == "training":
        return "a process is training this run. Stop the process first."
    if any(folder != run["path"] and _read(Path(folder)) for folder in inner):
        return "this run's directory contains other runs. Move them away."
    if not keep and os.path.lexists(path / layout.CORRECTIONS):
        return f"its {layout.CORRECTIONS} may contain your changes. Move it away."
    if keep and run["state"] not in ("finished", "diverged"):
        return "this run has not finished, and resumes from its newest checkpoint."
    if keep and not scores.best(path, checkpoints.steps(path / layout.CHECKPOINTS)):
        return "no checkpoint of this run has a score. Score one with eval first."
    return ""


def _prune_all(runs: Iterable[Mapping[str, Any]], keep: str | None) -> None:
    """Prunes each run; names at the end those that refuse to be."""
    refused = []
    for run in runs:
        try:
            _prune(run, keep)
        except UsageError as error:
            refused.append(str(error))
    if refused:
        raise UsageError("\n".join(refused))


def _prune(listed: Mapping[str, Any], keep: str | None) -> None:
    """Removes a run, or its checkpoints but the best, while no process trains it."""
    path = Path(listed["path"])
    aside = files.unused(path.with_name(f".{path.name}-removed"))
    with RunLock(path), explaining_errors(path):
        if (_read(path) or {}).get("changed") != listed["changed"]:
            raise UsageError(f"{path} has changed in the meantime. Repeat the command.")
        if keep:
            if checkpoints.delete_all_but_best(path, listed["state"]):
                say(f"Pruned {printable(str(path))}.")
            return
        files.rename(path, aside)  # A half-removed directory is not a run.
        try:
            shutil.rmtree(aside)
        except (OSError, RecursionError) as error:
            what = f"{path} is now {aside}, which you must remove: {reason(error)}."
            raise UsageError(what) from error
    say(f"Removed {printable(str(path))}.")
