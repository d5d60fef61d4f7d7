"""`python -m cifar10 runs`: lists the runs below a directory, and removes some."""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cifar10.config import flags, layout, length, run_config
from cifar10.errors import UsageError, counted, did_you_mean, printable, reason, say
from cifar10.process import files
from cifar10.run_directory import checkpoints, logs, scores
from cifar10.run_directory.early_stopping import EarlyStopping
from cifar10.run_directory.lock import RunLock, is_locked

HELP = "list runs with their state, step, score, size and age; remove some"
DESCRIPTION = """Lists the runs in and below a directory.

    python -m cifar10 runs
    python -m cifar10 runs runs --prune photos.1 trials/wide --yes

A run is `training` while a process trains it; `finished` at its last step, or
once its score no longer rises; `stopped` if it ended before, with a checkpoint of
its last step; `failed` if what it logged or computed later is lost; `damaged` if
its files cannot be read. The best score is that on val, if there is one.
"""
_PRUNE = "show what removing these runs would remove; with --yes, remove it"
_BLOCK = 512  # Bytes of the unit of `st_blocks`, whatever the file system.


@dataclasses.dataclass(frozen=True)
class Run:
    """The directory of a run."""

    name: str  # Its path in the directory that was searched.
    path: Path
    state: str
    problem: str = ""  # Why it is damaged, or where a link leads.
    step: int = 0
    max_steps: int | None = None
    best: Mapping[str, Any] | None = None
    bytes: int = 0  # On the disk.
    changed: float = 0.0  # When something was written last, in seconds since 1970.


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    place = "directory of runs (default: runs)"
    parser.add_argument(
        "directory", nargs="?", default="runs", metavar="DIR", help=place
    )
    parser.add_argument("--prune", nargs="+", default=[], metavar="NAME", help=_PRUNE)
    parser.add_argument("--yes", action="store_true", help="remove what --prune names")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: a list of runs"
    )
    given = flags.parse(parser, words)
    directory = layout.absolute_path(given["directory"])
    found = find_runs(directory)
    chosen = [_removable(name, found) for name in dict.fromkeys(given["prune"])]
    if given["yes"] and not chosen:
        raise UsageError("--yes removes what --prune names. Name some runs.")
    shown = chosen or found
    if given["json"]:
        print(json.dumps([dataclasses.asdict(run) for run in shown], default=str))
    else:
        where, size = printable(str(directory)), sum(run.bytes for run in shown) / 1e6
        width = max((len(printable(run.name)) for run in shown), default=0)
        print(*(f"{_line(run, width)}\n" for run in shown), sep="", end="")
        print(f"{counted(len(shown), 'run')} in {where}, {size:,.1f} MB")
    if given["yes"]:
        for run in chosen:
            remove(run.path)
            say(f"Removed {run.path}.")
    elif chosen:
        say("Nothing was removed. --yes removes these directories for good.")
    return 0


def find_runs(directory: Path) -> list[Run]:
    """Returns the runs in and below a directory by name; of a link only the name."""
    if not os.path.isdir(directory):  # noqa: PTH112 - `Path.is_dir` raises.
        raise UsageError(f"{directory} is no directory. Name one that holds runs.")
    found: list[Run] = []
    for folder, inner, names in os.walk(directory):
        inner[:] = [name for name in inner if not name.startswith(".")]
        path = Path(folder)
        if layout.CONFIG in names or layout.CHECKPOINTS in inner:
            found += _read(path, directory)
        for link in (path / name for name in inner):
            if link.is_symlink() and os.path.isfile(link / layout.CONFIG):  # noqa: PTH113
                to = f"to {os.path.realpath(link)}"
                found.append(Run(str(link.relative_to(directory)), link, "link", to))
    return sorted(found, key=lambda run: run.name)


def _read(path: Path, directory: Path) -> list[Run]:
    """Returns the run in a directory; none if another program's files are in it."""
    entries = _entries(path)
    name = path.name if path == directory else str(path.relative_to(directory))
    size = sum(entry.st_blocks * _BLOCK for entry in entries)
    changed = max((entry.st_mtime for entry in entries), default=0.0)
    run = Run(name, path, "damaged", bytes=size, changed=changed)
    is_ours = os.path.exists(path / layout.METRICS)  # noqa: PTH110
    try:
        saved = checkpoints.steps(path / layout.CHECKPOINTS)
        is_ours = is_ours or bool(saved)
        settings = run_config.read_run_config(path, complete=not is_ours)
        return [dataclasses.replace(run, **_progress(path, settings, saved))]
    except (UsageError, checkpoints.DamagedError, FileNotFoundError) as error:
        # A file of this name alone may be any program's.
        why = " ".join(str(error).split())
        return [dataclasses.replace(run, problem=why)] if is_ours else []


def _progress(
    path: Path, settings: Mapping[str, Any], saved: Sequence[int]
) -> dict[str, Any]:
    """Returns what a run has reached, by the names of `Run`."""
    lines = logs.read_lines(path / layout.METRICS)
    written = [line.get("step") for line in lines if isinstance(line, dict)]
    # A training that ends at a number that is not finite leaves the state before it.
    written += [*saved, *checkpoints.steps(path / layout.DEBUG_CHECKPOINTS)]
    step = max((at for at in written if type(at) is int), default=0)
    most = None if settings.get("max_hours") else settings.get("max_steps")
    best = None
    state = "stopped" if saved[-1:] == [step] else "failed"
    if saved:
        manifest = checkpoints.read_manifest(path / layout.CHECKPOINTS, saved[-1])
        record = EarlyStopping.from_manifest(manifest)
        is_over = record.should_stop(settings.get("stop_after_no_gain"))
        is_over |= length.is_time_up(settings, manifest.get("hours", 0.0))
        state = "finished" if is_over or saved[-1] == most else state
    for part in ("test", scores.deciding_part(path)):
        found = scores.read(path / layout.evaluation_events(part))
        for at in scores.ranked(found)[:1]:
            best = {"part": part, "score": found[at], "step": at}
    state = "training" if is_locked(path) else state
    return {"state": state, "step": step, "max_steps": most, "best": best}


def _entries(path: Path) -> list[os.stat_result]:
    """Returns all that is in a directory, each file once, and no link followed."""
    found = {}
    for folder, inner, names in os.walk(path):
        for name in (".", *inner, *names):
            with contextlib.suppress(FileNotFoundError):  # A training deletes some.
                entry = Path(folder, name).lstat()
                found[entry.st_dev, entry.st_ino] = entry
    return [*found.values()]


def _line(run: Run, width: int) -> str:
    said = run.problem or f"step {run.step:,}"
    if run.max_steps:
        said += f" of {run.max_steps:,}"
    if run.best:
        said += ", best {score:.3f} on {part} at step {step:,}".format(**run.best)
    size = f"{run.bytes / 1e6:,.1f} MB"
    age = f"{timedelta(seconds=int(max(0.0, time.time() - run.changed)))} ago"
    start = f"{printable(run.name):{width}}  {run.state:8}  {size:>10}  {age:>15}"
    return f"{start}  {printable(said)}"


def _removable(name: str, found: Sequence[Run]) -> Run:
    """Returns the run of a name; refuses what is in use, or not all this user's run."""
    there = layout.absolute_path(name)
    names = {run.name: run for run in found}
    run = names.get(name.rstrip("/")) or {r.path: r for r in found}.get(there)
    if run is None:
        why = f"there is no such run here.{did_you_mean(name, names)}"
    elif run.state == "training":
        why = "a process is training it. Stop it first."
    elif run.state == "link":
        why = "it is a link. Name the run that it leads to, in its own directory."
    elif any(run.path in other.path.parents for other in found):
        why = "other runs are in its directory. Move them away."
    elif any(entry.st_uid != os.geteuid() for entry in _entries(run.path)):
        why = "files of another user are in it."
    else:
        run_config.read_run_config(run.path, complete=False)  # Else it may be anything.
        return run
    raise UsageError(f"--prune {name}: {why}")


def remove(path: Path) -> None:
    """Removes a run's directory, while its lock keeps trainings out of it."""
    with RunLock(path):
        # What is half removed is no run.
        aside = files.rename(
            path, files.unused(path.with_name(f".{path.name}-removed"))
        )
        try:
            shutil.rmtree(aside)  # It follows no link.
        except OSError as error:
            what = f"{aside}, which was {path}, is not removed: {reason(error)}."
            raise UsageError(f"{what} Remove the rest by hand.") from error
