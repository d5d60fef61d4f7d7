"""Collects the contents of a run's report: its files, and a checkpoint's scores.

A missing or damaged file is not an error: the page says so and shows the rest.
"""

import base64
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.errors import UsageError
from cifar10.evaluation.eval_command import Options
from cifar10.evaluation.metrics import Outcomes, Sums
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets
from cifar10.run_directory import checkpoints, logs, scores
from cifar10.run_directory.restoring import Wanted
from cifar10.tools.heat_maps import explained
from cifar10.training import timing

_LARGEST = 1e100  # Beyond it Matplotlib's sums overflow; no training logs it.
_HARDEST = 24


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    step: int
    written: float  # In seconds since 1970.
    size: int  # In bytes.
    damage: str  # Empty if it is intact.


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a checkpoint on the whole test set."""

    step: int
    subject: str  # Which images and variables were scored, in words.
    class_names: tuple[str, ...]
    sums: Sums
    hardest: list[dict[str, Any]]  # The images of the largest loss, descending.
    calibrated: Sums | None = None  # With the temperature, if there is one.


@dataclasses.dataclass(eq=False)
class Run:
    """The contents of a run's directory, each list by ascending step."""

    path: Path
    name: str  # Unique in the report.
    settings: dict[str, Any]
    logged: list[dict[str, float]]  # The numbers of `metrics.jsonl`.
    scored: list[dict[str, float]]  # Evaluations of equally many images, of `part`.
    saved: list[SavedCheckpoint]
    seconds: dict[str, float]  # Of each part of its time; empty if not logged.
    notes: list[str]  # What is missing or unusual.
    part: str  # `val`, whose scores decide on the run, or without it `test`.
    best_by: str  # The score that decides.
    scores: Scores | None = None  # Of this report.
    tested: dict[str, float] = dataclasses.field(default_factory=dict)  # As a line.

    @property
    def step(self) -> int:
        """The last step with a line or a checkpoint; 0 if there is none."""
        logged = [int(line["step"]) for line in self.logged]
        return max(logged + [saved.step for saved in self.saved], default=0)

    @property
    def best(self) -> dict[str, float]:
        """The line with the best score; empty if no line has that score."""
        lines = {int(line["step"]): line for line in self.scored}
        found = {at: lines[at][by] for at in lines if (by := self.best_by) in lines[at]}
        return next((lines[at] for at in scores.ranked(found, self.best_by)), {})

    @property
    def rate(self) -> float | None:
        """Median of the images per second; None if there are none."""
        key = "examples_per_sec"
        rates = [line[key] for line in self.logged if key in line]
        return statistics.median(rates) if rates else None

    def score(
        self,
        device: str,
        data_dir: str | None,
        trust_model: str | None,
        wanted: Wanted,
    ) -> None:
        """Scores the newest intact checkpoint, or the wanted one, as `eval.py` does.

        Raises:
            UsageError: The checkpoint, the model or the data cannot be used.
        """
        trained = TrainedModel(self.path, trust_model=trust_model)
        step = trained.restore(wanted)
        dataset = datasets.find_again(self.settings, data_dir)
        events = self.path / layout.EVALUATION_EVENTS
        scored = ScoredSet(trained.model, self.settings, dataset, events, Options())
        values = trained.trainable, device, trained.temperature
        sums, scalars, outcomes, after = scored.score(*values)
        self.scores = Scores(
            *(step, scored.subject, dataset.class_names, sums),
            *(_hardest(dataset, outcomes, trained, device), after),
        )
        self.tested = {"step": step, "num_examples": sums.count, **scalars}
        if self.part == "test":
            lines = [*self.scored, self.tested]
            self.scored = [*scores.comparable(lines, sums.count).values()]


def _hardest(
    dataset: datasets.Dataset, outcomes: Outcomes, trained: TrainedModel, device: str
) -> list[dict[str, Any]]:
    """Returns the test images of the largest loss, descending, and where it looks."""
    numbers = np.argsort(-outcomes.cross_entropy, kind="stable")[:_HARDEST]
    images = dataset.read("test")[0][numbers]
    drawn = explained(trained, images, outcomes.predictions[numbers], device)
    return [
        {
            "png": base64.b64encode(tf.io.encode_png(image).numpy()).decode(),
            "looks_at": base64.b64encode(heat).decode(),
            "height": image.shape[0],
            "width": image.shape[1],
            "number": int(number),  # Its index in the set.
            "true": dataset.class_names[outcomes.labels[number]],
            "predicted": dataset.class_names[outcomes.predictions[number]],
            "confidence": float(outcomes.confidence[number]),
            "cross_entropy": float(outcomes.cross_entropy[number]),
        }
        for number, image, heat in zip(numbers, images, drawn, strict=True)
    ]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads the runs of directories; one that is named twice counts once."""
    distinct = list(dict.fromkeys(path.resolve() for path in paths))
    common = os.path.commonpath([path.parent for path in distinct])
    return [_read_run(path, str(path.relative_to(common))) for path in distinct]


def _read_run(path: Path, name: str) -> Run:
    settings = run_config.read_run_config(path)
    notes = _notes_on(settings)
    logged = _lines(path / layout.METRICS, notes)
    if not logged:
        notes.append("The training has logged nothing yet, so it has no curves.")
    scored = _lines(scores.deciding_folder(path) / layout.METRICS, notes)
    times = timing.read_seconds(path / layout.METRICS)
    return Run(
        path,
        name,
        settings,
        logged,
        scored=[*scores.comparable(scored).values()],
        saved=_checkpoints(path / layout.CHECKPOINTS, notes),
        seconds=times[-1][1] if times else {},
        notes=notes,
        part=scores.deciding_part(path),
        best_by=scores.deciding_score(path),
    )


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
    """Reads the numbers of a log's intact lines; adds a note about damaged lines."""
    entries = logs.read_lines(path)
    intact = [entry for entry in map(_numbers, entries) if "step" in entry]
    if damaged := len(entries) - len(intact):
        log = f"{path.parent.name}/{path.name}"
        notes.append(f"{damaged} of {len(entries)} lines of {log} cannot be read.")
    return intact


def _numbers(entry: Any) -> dict[str, float]:
    """Returns the numbers of a line that are small enough to plot."""
    return {
        name: value
        for name, value in (entry.items() if isinstance(entry, dict) else ())
        if isinstance(value, int | float) and abs(value) <= _LARGEST
    }


def _checkpoints(folder: Path, notes: list[str]) -> list[SavedCheckpoint]:
    saved = []
    for step in checkpoints.steps(folder):
        with contextlib.suppress(OSError):  # The training may delete it meanwhile.
            saved.append(_checkpoint(folder, step))
    damaged = [str(checkpoint.step) for checkpoint in saved if checkpoint.damage]
    if not saved:
        notes.append("There is no checkpoint yet.")
    if damaged:
        notes.append(f"DAMAGED checkpoints, of step {', '.join(damaged)}.")
    return saved


def _checkpoint(folder: Path, step: int) -> SavedCheckpoint:
    """Checks a checkpoint; raises an `OSError` if it no longer exists."""
    damage = ""
    path = checkpoints.folder(folder, step)
    try:
        checkpoints.verify(folder, step)
    except (checkpoints.DamagedError, UsageError) as error:
        damage = str(error)
    parts = [file.stat() for file in path.iterdir()]
    # Marks that are added later change the folder, but not these files.
    written = min(file.st_mtime for file in (path.stat(), *parts))
    return SavedCheckpoint(step, written, sum(file.st_size for file in parts), damage)
