"""Reads the files of a run, and evaluates one of its checkpoints, for the report.

A missing or damaged file is not an error: the report notes it and shows the rest.
"""

import base64
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.errors import UsageError
from cifar10.evaluation import eval_command
from cifar10.evaluation.metrics import Outcomes, Sums
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets
from cifar10.run_directory import checkpoints, logs, scores
from cifar10.tools.heat_maps import draw, heat_maps
from cifar10.training import timing

if TYPE_CHECKING:
    from cifar10.tools.report import Options

_LARGEST = 1e100  # Matplotlib's sums overflow with values that are much larger.
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
    hardest: list[dict[str, Any]]  # The images of the largest losses, largest first.
    calibrated: Sums | None = None  # With the temperature, if the run has one.


class Run:
    """The contents of a run's directory, with lists sorted by step."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name  # Unique in the report.
        self.settings = run_config.read_run_config(path)
        notes = self.notes = _notes_on(self.settings)  # What is missing or unusual.
        self.logged = _lines(path / layout.METRICS, notes)
        if not self.logged:
            notes.append("The run has logged nothing yet, so there are no curves.")
        self.part = scores.deciding_part(path)  # `val` if the run has it, else `test`.
        self.best_by = scores.deciding_score(path)
        found = {}  # By part, evaluations of the same number of images.
        for part in dict.fromkeys((self.part, "test")):
            log = path / layout.evaluation_events(part) / layout.METRICS
            found[part] = [*scores.comparable(_lines(log, notes)).values()]
        self.scored = found[self.part]
        self.saved = _checkpoints(path / layout.CHECKPOINTS, notes)
        times = timing.read_seconds(path / layout.METRICS)
        self.seconds = times[-1][1] if times else {}  # Seconds by activity.
        self.scores: Scores | None = None  # Set by `score`.
        self.tested: dict[str, float] = (found["test"] or [{}])[-1]  # Set by `score`.

    @property
    def step(self) -> int:
        """The last step with a log line or a checkpoint; 0 if there is none."""
        logged = [int(line["step"]) for line in self.logged]
        return max(logged + [saved.step for saved in self.saved], default=0)

    @property
    def best(self) -> dict[str, float]:
        """The log line with the best score; empty if no line has a score."""
        by = self.best_by
        lines = {int(line["step"]): line for line in self.scored if by in line}
        ranked = scores.ranked({step: lines[step][by] for step in lines}, by)
        return lines[ranked[0]] if ranked else {}

    @property
    def rate(self) -> float | None:
        """Median of the logged speeds, in images per second; None if none is logged."""
        key = "examples_per_sec"
        rates = [line[key] for line in self.logged if key in line]
        return statistics.median(rates) if rates else None

    def score(self, options: "Options", device: str) -> None:
        """Scores the checkpoint of `options.step`, or the newest intact one.

        Raises:
            UsageError: The checkpoint, the model or the data cannot be used.
        """
        trained = TrainedModel(self.path, trust_model=options.trust_model)
        step = trained.restore(options.step)
        dataset = datasets.find_again(self.settings, options.data_dir)
        events, how = self.path / layout.EVALUATION_EVENTS, eval_command.Options()
        scored = ScoredSet(trained.model, self.settings, dataset, events, how)
        values = trained.trainable, device, trained.temperature
        sums, scalars, outcomes, calibrated = scored.score(*values)
        hardest = _hardest(dataset, outcomes, trained, device)
        names = dataset.class_names
        self.scores = Scores(step, scored.subject, names, sums, hardest, calibrated)
        self.tested = {"step": step, "num_examples": sums.count, **scalars}
        if self.part == "test" and datasets.is_of_run(dataset, self.settings):
            lines = [*self.scored, self.tested]
            self.scored = [*scores.comparable(lines, sums.count).values()]


def _hardest(
    dataset: datasets.Dataset, outcomes: Outcomes, trained: TrainedModel, device: str
) -> list[dict[str, Any]]:
    """Returns the test images with the largest losses, and their heat maps."""
    numbers = np.argsort(-outcomes.cross_entropy, kind="stable")[:_HARDEST]
    confidence = outcomes.at(trained.temperature).confidence  # As in `predict`.
    images, names = dataset.read("test")[0][numbers], dataset.paths.get("test")
    maps = heat_maps(trained, images, outcomes.predictions[numbers], device)
    drawn = [b""] * len(images) if maps is None else map(draw, images, maps)
    return [
        {
            "png": base64.b64encode(tf.io.encode_png(image).numpy()).decode(),
            "looks_at": base64.b64encode(heat).decode(),
            "height": image.shape[0],
            "width": image.shape[1],
            "name": names[number] if names else f"test image {number}",
            "true": dataset.class_names[outcomes.labels[number]],
            "predicted": dataset.class_names[outcomes.predictions[number]],
            "confidence": float(confidence[number]),
            "cross_entropy": float(outcomes.cross_entropy[number]),
        }
        for number, image, heat in zip(numbers, images, drawn, strict=True)
    ]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads the runs in directories, each directory only once."""
    distinct = list(dict.fromkeys(path.resolve() for path in paths))
    common = os.path.commonpath([path.parent for path in distinct])
    return [Run(path, str(path.relative_to(common))) for path in distinct]


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
    """Returns the numbers in a log's intact lines; counts damaged lines in a note."""
    entries = logs.read_lines(path)
    intact = [entry for entry in map(_numbers, entries) if "step" in entry]
    if damaged := len(entries) - len(intact):
        log = f"{path.parent.name}/{path.name}"
        notes.append(f"{damaged} of {len(entries)} lines of {log} cannot be read.")
    return intact


def _numbers(entry: Any) -> dict[str, float]:
    """Returns a log line's numbers that are small enough to plot."""
    return {
        name: value
        for name, value in (entry.items() if isinstance(entry, dict) else ())
        if isinstance(value, int | float) and abs(value) <= _LARGEST
    }


def _checkpoints(directory: Path, notes: list[str]) -> list[SavedCheckpoint]:
    saved = []
    for step in checkpoints.steps(directory):
        path, damage = checkpoints.folder(directory, step), ""
        with contextlib.suppress(OSError):  # A training run may delete the checkpoint.
            try:
                checkpoints.verify(directory, step)
            except (checkpoints.DamagedError, UsageError) as error:
                damage = str(error)
            parts = [file.stat() for file in path.iterdir()]
            # Later marks change the time of the folder, but not of these files.
            written = min(file.st_mtime for file in (path.stat(), *parts))
            size = sum(file.st_size for file in parts)
            saved.append(SavedCheckpoint(step, written, size, damage))
    damaged = [str(checkpoint.step) for checkpoint in saved if checkpoint.damage]
    if not saved:
        notes.append("There is no checkpoint yet.")
    if damaged:
        notes.append(f"DAMAGED checkpoints: step {', '.join(damaged)}.")
    return saved
