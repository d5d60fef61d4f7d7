"""What a run's directory says of it, read without TensorFlow's event files.

What is missing or torn is not an error: the report says so and shows the rest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar10 import checkpoints, config_file, run_directory, scores
from cifar10.errors import UsageError


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as the report lists it.

    Attributes:
        step: Its step.
        written: When it was written, in seconds since 1970.
        size: Bytes of its files.
        damage: What is wrong with it; empty where it is as it was written.
    """

    step: int
    written: float
    size: int
    damage: str


@dataclasses.dataclass
class Run:
    """A run, as far as its directory tells.

    Attributes:
        path: The directory.
        name: A name that no other run of the report has.
        number: Its place in the report, from 1.
        settings: The content of `config.json`.
        logged: The lines of `metrics.jsonl`.
        scored: Those of `eval/metrics.jsonl` that count, by ascending step.
        saved: Its checkpoints, by ascending step.
        notes: Sentences on what is missing or has to be known.
    """

    path: Path
    name: str
    number: int
    settings: dict[str, Any]
    logged: list[dict[str, Any]]
    scored: list[dict[str, Any]]
    saved: list[SavedCheckpoint]
    notes: list[str]

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Returns steps and values of a metric; NaN where a line has no number."""
        return curve(self.logged, metric)


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Reads runs.

    Args:
        paths: Their directories; one that is named twice counts once.

    Raises:
        UsageError: One is not the directory of a run.
    """
    different = list(dict.fromkeys(path.resolve() for path in paths))
    names = distinguishing_names(different)
    return [
        _read(path, name, number)
        for number, (path, name) in enumerate(zip(different, names, strict=True), 1)
    ]


def distinguishing_names(paths: Sequence[Path]) -> list[str]:
    """Returns the folders' names, with as many parents as make them different."""

    def name(path: Path, parts: int) -> str:
        return str(Path(*path.parts[-parts:]))

    lengths = [1] * len(paths)
    while True:
        names = [name(*pair) for pair in zip(paths, lengths, strict=True)]
        twice = [names.count(own) > 1 for own in names]
        if not any(twice):
            return names
        lengths = [length + again for length, again in zip(lengths, twice, strict=True)]


def curve(
    lines: Sequence[dict[str, Any]], metric: str
) -> tuple[list[int], list[float]]:
    """Returns steps and values of a metric; NaN where a line has no finite number."""
    steps = [line["step"] for line in lines if metric in line]
    values = [line[metric] for line in lines if metric in line]
    return steps, [float(v) if _is_number(v) else math.nan for v in values]


def _read(path: Path, name: str, number: int) -> Run:
    settings = config_file.read(path / run_directory.CONFIG)
    notes = _notes_on(settings)
    logged = _lines(path / run_directory.METRICS, notes)
    if not logged:
        notes.append("The training has logged nothing yet; there are no curves of it.")
    evaluations = path / run_directory.EVALUATION_EVENTS
    scored = _scored(evaluations, _lines(evaluations / run_directory.METRICS, notes))
    if not scored:
        notes.append(
            "eval.py has scored no checkpoint yet, so there is no curve of accuracy."
        )
    saved = _checkpoints(path / run_directory.CHECKPOINTS, notes)
    return Run(path, name, number, settings, logged, scored, saved, notes)


def _notes_on(settings: dict[str, Any]) -> list[str]:
    notes = []
    if settings["simulated"]:
        notes.append("SIMULATED towers on the CPU; their speed says nothing of GPUs.")
    if not settings.get("data_is_real", True):
        notes.append("Trained on the SYNTHETIC stand-in, which is NOT CIFAR-10.")
    sessions = settings.get("earlier_sessions") or []
    if sessions:
        where = {str(session.get("devices")) for session in sessions}
        notes.append(f"Resumed; earlier sessions ran on: {'; '.join(sorted(where))}.")
    return notes


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Reads the lines that are whole, and notes those that are not."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror}.")
        return []
    entries = [_entry(line) for line in lines if line]
    whole = [entry for entry in entries if entry is not None]
    if len(whole) < len(entries):
        torn = len(entries) - len(whole)
        file = f"{path.parent.name}/{path.name}"
        notes.append(f"{torn} of {len(entries)} lines of {file} cannot be read.")
    return whole


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        return entry if isinstance(entry["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _scored(directory: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last line of each step among those that the training goes by too."""
    try:
        counted = scores.read(directory)
    except UsageError:  # It is noted already.
        return []
    chosen = {
        line["step"]: line
        for line in lines
        if counted.get(line["step"]) == line.get("precision @ 1")
    }
    return [chosen[step] for step in sorted(chosen)]


def _checkpoints(folder: Path, notes: list[str]) -> list[SavedCheckpoint]:
    try:
        steps = checkpoints.steps(folder)
    except UsageError as error:
        notes.append(str(error))
        return []
    found = [_checkpoint(folder, step) for step in steps]
    saved = [checkpoint for checkpoint in found if checkpoint is not None]
    damaged = [str(checkpoint.step) for checkpoint in saved if checkpoint.damage]
    if not saved:
        notes.append("There is no checkpoint yet.")
    if damaged:
        notes.append(f"DAMAGED checkpoints, of step {', '.join(damaged)}.")
    return saved


def _checkpoint(folder: Path, step: int) -> SavedCheckpoint | None:
    """Looks at one checkpoint; None if the training deletes it meanwhile."""
    damage = ""
    try:
        checkpoints.verify(folder, step)
    except FileNotFoundError:
        return None
    except (checkpoints.DamagedError, UsageError) as error:
        damage = str(error)
    path = checkpoints.folder(folder, step)
    try:
        parts = [part.stat() for part in path.iterdir()]
    except OSError:
        return None
    written = max((part.st_mtime for part in parts), default=time.time())
    return SavedCheckpoint(step, written, sum(part.st_size for part in parts), damage)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
