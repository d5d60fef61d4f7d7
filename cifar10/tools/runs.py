"""`python -m cifar10 runs`: lists the runs below a directory, and removes some."""

import argparse
import contextlib
import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.config import flags, layout
from cifar10.config.fields import PRECISION
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted, printable, reason, say
from cifar10.run_directory import checkpoints, logs, scores, seeds, starting
from cifar10.run_directory.early_stopping import why_ended
from cifar10.run_directory.lock import RunLock, is_locked

HELP = "list runs with their state, step, score, size and age; remove some"
DESCRIPTION = """Lists the runs in and below a directory.

    python -m cifar10 runs
    python -m cifar10 runs runs --prune photos.1 trials/wide --yes

The state of a run is `training` while a process trains it; `finished` at the
last step, or if training ended because the score no longer rose; `stopped` if
training ended earlier, with a checkpoint of its last step; `failed` if the last
checkpoint is older than the last step; `damaged` if files cannot be read.
"""
# Files whose newest change dates a run. Any command may write other files.
_OF_A_TRAINING = (layout.CONFIG, layout.METRICS, checkpoints.MANIFEST)
# By the flag --sort; best scores and newest runs come first.
_ORDERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "state": lambda run: run["state"],
    "age": lambda run: -run["changed"],
    "size": lambda run: -run["bytes"],
    "score": lambda run: -((run.get("scores") or {}).get(PRECISION, -1.0)),
}
_PRUNE = "list the runs to remove; with --yes, remove them"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    place = "directory of runs (default: runs)"
    parser.add_argument("DIR", nargs="?", default="runs", help=place)
    parser.add_argument("--prune", nargs="+", default=[], metavar="NAME", help=_PRUNE)
    parser.add_argument("--yes", action="store_true", help="remove the runs of --prune")
    parser.add_argument("--json", action="store_true", help="print JSON, a list")
    parser.add_argument("--csv", action="store_true", help="print a table as CSV")
    by = "order of the list (default: name)"
    parser.add_argument("--sort", choices=["name", *_ORDERS], default="name", help=by)
    given = flags.parse(parser, words)
    directory = layout.absolute_path(given["DIR"])
    try:
        runs = find_runs(directory)
    except RecursionError as error:  # Up to Python 3.11, `os.walk` is recursive.
        why = "holds a thousand folders within each other. Remove them."
        raise UsageError(f"{directory} {why}") from error
    if given["prune"]:
        names = map(os.path.normpath, given["prune"])
        runs = {name: _removable(name, runs) for name in names}
    if order := _ORDERS.get(given["sort"]):
        runs = dict(sorted(runs.items(), key=lambda item: order(item[1])))
    named = [{"name": name, **run} for name, run in runs.items()]
    if given["json"]:
        print(json.dumps(named))
    elif given["csv"]:
        _print_table(named)
    else:
        _print(runs, directory)
    if given["prune"] and not given["yes"]:
        say("Nothing was removed. --yes removes these directories for good.")
    elif given["prune"]:  # Alone --yes removes nothing.
        for run in runs.values():
            remove(Path(run["path"]))
            say(f"Removed {run['path']}.")
    return 0


def find_runs(directory: Path) -> dict[str, dict[str, Any]]:
    """Finds the runs in and below a directory; maps relative paths to JSON values.

    Each run has `path`, `bytes`, `state`, and `changed`: the time of its newest
    checkpoint or log line in seconds since 1970. A damaged run has a `problem`, others
    have `step`, `best`, `starts`, `max_steps` (null with --max_hours), `settings` from
    config.json, and their last `scores` on the split `scored`. Follows no links.
    """
    if not os.path.isdir(directory):  # noqa: PTH112 - `Path.is_dir` raises.
        raise UsageError(f"{directory} is not a directory. Name one that holds runs.")
    found = {}
    for folder, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if layout.CONFIG in names and (run := _read(Path(folder))):
            found[os.path.relpath(folder, directory)] = run
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the run in a directory, or None if another program made `config.json`."""
    size, changed = 0, 0.0
    for folder, inner, names in os.walk(path):
        if layout.CONFIG in names and folder != str(path):
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
    """Returns the state of a run, its last step and its best score."""
    path, limits = run.directory, run.config.run
    saved = checkpoints.steps(path / layout.CHECKPOINTS)
    logged = [line["step"] for line in logs.read_steps(path / layout.METRICS)]
    # A run that ends at a loss of NaN or infinity saves the state before that step.
    debugged = checkpoints.steps(path / layout.DEBUG_CHECKPOINTS)
    step = max([0, *logged, *saved, *debugged])
    split, by, images, values = scores.deciding(path)
    best = None
    for at in scores.ranked(values, by)[:1]:
        best = {"part": split, "by": by, "score": values[at], "step": at}
        best["images"] = images
    state = "stopped" if saved[-1:] == [step] else "failed"
    if saved:
        manifest = checkpoints.read_manifest(path / layout.CHECKPOINTS, saved[-1])
        state = "finished" if why_ended(run.config, manifest) else state
    state = "training" if is_locked(path) else state
    last = None if limits.max_hours else limits.max_steps
    numbers = {"step": step, "max_steps": last, "best": best}
    split, line = seeds.last_scores(run)
    found = {"settings": run.entries, "scored": split, "scores": line}
    return {"state": state, **numbers, "starts": starting.read_starts(path), **found}


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
            print(f"{one}: {printable(', '.join(one.names))}")
    size = f"{sum(run['bytes'] for run in runs.values()) / 1e6:,.1f} MB"
    print(f"{counted(len(runs), 'run')} in {printable(str(directory))}, {size}")


def _print_table(runs: Sequence[Mapping[str, Any]]) -> None:
    """Prints a row for each run: what it is, its scores, and its settings."""
    rows = []
    for run in runs:
        of_run = {name: run.get(name) for name in ("name", "state", "step", "scored")}
        several = {**run.get("settings", {}), **of_run, **run.get("scores", {})}
        plain = {k: v for k, v in several.items() if not isinstance(v, list | dict)}
        rows.append({**dict.fromkeys([*of_run, *run.get("scores", {})]), **plain})
    names = dict.fromkeys(name for row in rows for name in row)
    table = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


def _removable(name: str, runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the run `name`; refuses a run in use, or one that contains other runs."""
    path = runs.get(name, {}).get("path", "")
    inner = (folder for folder, _, names in os.walk(path) if layout.CONFIG in names)
    if name not in runs:
        why = "there is no run of this name."
    elif runs[name]["state"] == "training":
        why = "a process is training this run. Stop the process first."
    elif any(folder != path and _read(Path(folder)) for folder in inner):  # Hidden too.
        why = "this run's directory contains other runs. Move them away."
    else:
        return runs[name]
    raise UsageError(f"--prune {name}: {why}")


def remove(path: Path) -> None:
    """Removes a run's directory, holding its lock so that no process trains the run."""
    aside = files.unused(path.with_name(f".{path.name}-removed"))
    with RunLock(path):
        files.rename(path, aside)  # A half-removed directory is no run.
        try:
            shutil.rmtree(aside)
        except (OSError, RecursionError) as error:
            what = f"{path} is now {aside}, which you have to remove: {reason(error)}."
            raise UsageError(what) from error
