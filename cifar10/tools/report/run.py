"""Reads the files of a run, without TensorFlow's event files.

What is missing or damaged is not an error: the report says so and shows the rest.
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar10.config import config_file
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, layout, scores
from cifar10.training import goodput

# What is shown of the lines of a training, and of those of its evaluation.
_LOG = ("step", "total_loss", "total_loss/average", "examples_per_sec", "learning_rate")
_LARGEST = 1e100  # Beyond it Matplotlib's sums overflow; no training logs it.
_SCORED = (
    *("precision @ 1", "precision @ 5", "macro F1", "balanced accuracy"),
    *("cross_entropy", "num_examples"),
)


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    step: int
    written: float  # In seconds since 1970.
    size: int  # In bytes.
    damage: str  # Empty if it is intact.


@dataclasses.dataclass
class Run:
    """The contents of a run's directory, each list by ascending step."""

    path: Path
    name: str  # Unique in the report.
    number: int  # Its place in the report, from 1.
    settings: dict[str, Any]
    logged: list[dict[str, float]]  # What the report shows of `metrics.jsonl`.
    scored: list[dict[str, float]]  # eval.py's and this report's that are comparable.
    saved: list[SavedCheckpoint]
    notes: list[str]  # What is missing or unusual.
    seconds: dict[str, float]  # Of each part of its time; empty if not logged.

    @property
    def step(self) -> int:
        """The last step of which there is a line or a checkpoint; 0 without any."""
        logged = [int(line["step"]) for line in self.logged]
        return max(logged + [saved.step for saved in self.saved], default=0)

    @property
    def best(self) -> dict[str, float]:
        """The line of the best score; there has to be one."""
        lines = {int(line["step"]): line for line in self.scored}
        found = {step: line["precision @ 1"] for step, line in lines.items()}
        return lines[scores.ranked(found)[0]]

    @property
    def rate(self) -> float | None:
        """Median of the images per second; None if there are none."""
        key = "examples_per_sec"
        rates = [line[key] for line in self.logged if key in line]
        return statistics.median(rates) if rates else None


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Reads the runs of directories; one that is named twice counts once."""
    distinct = list(dict.fromkeys(path.resolve() for path in paths))
    common = os.path.commonpath([path.parent for path in distinct])
    return [
        _read(path, str(path.relative_to(common)), number)
        for number, path in enumerate(distinct, 1)
    ]


def _read(path: Path, name: str, number: int) -> Run:
    settings = config_file.read(path / layout.CONFIG)
    notes = _notes_on(settings)
    logged = _lines(path / layout.METRICS, notes)
    if not logged:
        notes.append("The training has logged nothing yet, so it has no curves.")
    lines = _lines(path / layout.EVALUATION_EVENTS / layout.METRICS, notes)
    scored = list(scores.comparable(lines).values())
    saved = _checkpoints(path / layout.CHECKPOINTS, notes)
    times = goodput.read(path / layout.METRICS)
    seconds = times[-1][1] if times else {}
    return Run(path, name, number, settings, logged, scored, saved, notes, seconds)


def _notes_on(settings: dict[str, Any]) -> list[str]:
    notes = []
    if settings["simulated"]:
        notes.append(
            "SIMULATED towers, several on one device; their speed says nothing about "
            "several GPUs."
        )
    if not settings.get("data_is_real", True):
        notes.append("Trained on the SYNTHETIC stand-in, which is NOT CIFAR-10.")
    if sessions := settings.get("earlier_sessions"):
        devices = sorted({str(session.get("devices")) for session in sessions})
        notes.append(f"Resumed; earlier sessions ran on: {'; '.join(devices)}.")
    return notes


def _lines(path: Path, notes: list[str]) -> list[dict[str, float]]:
    """Returns the intact lines of a log, and notes how many are damaged."""
    entries = [_numbers(entry) for entry in scores.read_lines(path)]
    intact = [entry for entry in entries if entry is not None]
    if damaged := len(entries) - len(intact):
        log = f"{path.parent.name}/{path.name}"
        notes.append(f"{damaged} of {len(entries)} lines of {log} cannot be read.")
    return intact


def _numbers(entry: Any) -> dict[str, float] | None:
    """Returns the numbers of a line that the report shows; None if it is damaged."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return None
    found = {name: entry.get(name) for name in _LOG + _SCORED}
    numbers = {n: v for n, v in found.items() if isinstance(v, int | float)}
    shown = {n: v for n, v in numbers.items() if not _LARGEST < abs(v) < math.inf}
    return shown if "step" in shown else None


def _checkpoints(folder: Path, notes: list[str]) -> list[SavedCheckpoint]:
    found = [_checkpoint(folder, step) for step in checkpoints.steps(folder)]
    saved = [checkpoint for checkpoint in found if checkpoint is not None]
    damaged = [str(checkpoint.step) for checkpoint in saved if checkpoint.damage]
    if not saved:
        notes.append("There is no checkpoint yet.")
    if damaged:
        notes.append(f"DAMAGED checkpoints, of step {', '.join(damaged)}.")
    return saved


def _checkpoint(folder: Path, step: int) -> SavedCheckpoint | None:
    """Checks a checkpoint; returns None if the training deletes it meanwhile."""
    damage = ""
    try:
        checkpoints.verify(folder, step)
    except FileNotFoundError:
        return None
    except (checkpoints.DamagedError, UsageError) as error:
        damage = str(error)
    path = checkpoints.folder(folder, step)
    try:
        parts = [file.stat() for file in path.iterdir()]
        # Marks that are added later change the folder, but not these files.
        written = min(file.st_mtime for file in (path.stat(), *parts))
    except OSError:
        return None
    return SavedCheckpoint(step, written, sum(file.st_size for file in parts), damage)
