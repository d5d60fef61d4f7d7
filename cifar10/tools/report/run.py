"""What a run's directory says of it, read without TensorFlow's event files.

What is missing or torn is not an error: the report says so and shows the rest.
"""

from __future__ import annotations

import array
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from cifar10.config import config_file
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, layout, scores

# What the page shows of a line.
_SHOWN = {
    "step",
    "total_loss",
    "total_loss/average",
    "examples_per_sec",
    "learning_rate",
    "precision @ 1",
    "precision @ 5",
    "cross_entropy",
}
# A curve has at most twice as many points; a screen shows no more.
_POINTS = 2000
# The largest step that a checkpoint can hold, and the largest value that can be drawn.
_FARTHEST = 2**63 - 1
_HIGHEST = 1e300


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
        logged: Lines of `metrics.jsonl`, evenly spread if there are very many; the
            first and the last are among them.
        rate: Median of the images a second of all lines; None where there are none.
        scored: Those of `eval/metrics.jsonl` that count, by ascending step.
        saved: Its checkpoints, by ascending step.
        notes: Sentences on what is missing or has to be known.
    """

    path: Path
    name: str
    number: int
    settings: dict[str, Any]
    logged: list[dict[str, Any]]
    rate: float | None
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
    """Returns steps and values of a metric; NaN where a line has none to draw."""
    steps = [line["step"] for line in lines if metric in line]
    values = [line[metric] for line in lines if metric in line]
    drawn = [_is_number(v) and abs(v) <= _HIGHEST for v in values]
    return steps, [
        float(v) if can else math.nan for v, can in zip(values, drawn, strict=True)
    ]


def _read(path: Path, name: str, number: int) -> Run:
    settings = config_file.read(path / layout.CONFIG)
    notes = _notes_on(settings)
    logged, rate = _logged(_lines(path / layout.METRICS, notes))
    if not logged:
        notes.append("The training has logged nothing yet; there are no curves of it.")
    evaluations = path / layout.EVALUATION_EVENTS
    scored = _scored(evaluations, _lines(evaluations / layout.METRICS, notes))
    if not scored:
        notes.append(
            "eval.py has scored no checkpoint yet, so there is no curve of accuracy."
        )
    saved = _checkpoints(path / layout.CHECKPOINTS, notes)
    return Run(path, name, number, settings, logged, rate, scored, saved, notes)


def _notes_on(settings: dict[str, Any]) -> list[str]:
    notes = []
    if settings["simulated"]:
        notes.append("SIMULATED towers on the CPU; their speed says nothing of GPUs.")
    if not settings.get("data_is_real", True):
        notes.append("Trained on the SYNTHETIC stand-in, which is NOT CIFAR-10.")
    sessions = settings.get("earlier_sessions")
    if isinstance(sessions, list) and sessions:
        where = {
            str(session.get("devices") if isinstance(session, dict) else session)
            for session in sessions
        }
        notes.append(f"Resumed; earlier sessions ran on: {'; '.join(sorted(where))}.")
    return notes


def _logged(
    lines: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], float | None]:
    """Returns lines to draw, and the median of the images a second of all lines."""
    kept: list[dict[str, Any]] = []
    rates = array.array("d")
    every, last = 1, None
    for number, last in enumerate(lines):
        if number % every == 0:
            kept.append(last)
        if len(kept) == 2 * _POINTS:
            kept, every = kept[::2], 2 * every
        if _is_number(rate := last.get("examples_per_sec")):
            rates.append(rate)
    if last is not None and last is not kept[-1]:
        kept.append(last)
    return kept, statistics.median(rates) if rates else None


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Reads the lines that are whole, and notes those that are not."""
    count = torn = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                count += 1
                if (entry := _entry(line)) is None:
                    torn += 1
                else:
                    yield entry
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror}.")
    if torn:
        file_name = f"{path.parent.name}/{path.name}"
        notes.append(f"{torn} of {count} lines of {file_name} cannot be read.")


def _entry(line: bytes) -> dict[str, Any] | None:
    """Returns what is shown of a line; None stands for what is no number."""
    try:
        entry = json.loads(line)
        step = entry["step"]
        if not isinstance(step, int) or not _is_number(step) or abs(step) > _FARTHEST:
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return {
        name: value if isinstance(value, float) or _is_number(value) else None
        for name, value in entry.items()
        if name in _SHOWN
    }


def _scored(directory: Path, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last line of each step among those that the training goes by too."""
    try:
        counted = scores.read(directory)
    except UsageError:  # It is noted too.
        counted = {}
    chosen = {
        line["step"]: line
        for line in lines
        if line["step"] in counted
        and counted[line["step"]] == line.get("precision @ 1")
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
        parts = {part.name: part.stat() for part in path.iterdir()}
    except OSError:
        return None
    # Other files come later, as the mark of one that is kept for good.
    whole = (
        [parts[checkpoints.MANIFEST]]
        if checkpoints.MANIFEST in parts
        else parts.values()
    )
    written = max((part.st_mtime for part in whole), default=time.time())
    size = sum(part.st_size for part in parts.values())
    return SavedCheckpoint(step, written, size, damage)


def _is_number(value: object) -> TypeGuard[float]:
    try:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
        )
    except OverflowError:  # An integer beyond all floats.
        return False
