"""Reads the files of a run, and evaluates one of its checkpoints, for the report.

A missing or damaged file is not an error: the report notes it and shows the rest.
"""

import base64
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.errors import UsageError
from cifar10.evaluation.eval_options import Options
from cifar10.evaluation.metrics import Outcomes, Sums
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.input import datasets
from cifar10.run_directory import checkpoints, logs, scores, starting
from cifar10.run_directory.averages import divergence
from cifar10.tools.heat_maps import draw, heat_maps
from cifar10.trained_model import TrainedModel

_LARGEST = 1e100  # Matplotlib's sums overflow with values that are much larger.
_HARDEST = 24


class Scores(NamedTuple):
    """The scores of a checkpoint on the whole test set."""

    subject: str  # Which images and variables were scored, in words.
    class_names: tuple[str, ...]
    sums: Sums
    hardest: list[dict[str, Any]]  # The images of the largest losses, largest first.
    calibrated: Sums | None = None  # With the temperature, if the run has one.


class ReportedRun:
    """The contents of a run's directory, with lists sorted by step."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name  # The name is unique in the report.
        self.recorded = run_config.RecordedRun.read(path)
        self.logged = _lines(path / layout.METRICS)
        self.split = scores.decided_by(path)[0]
        # Evaluations of the same number of images.
        self.scored = _evaluations(path, self.split)
        self.tested: dict[str, float] = (_evaluations(path, "test") or [{}])[-1]
        self.saved = _checkpoints(path / layout.CHECKPOINTS)
        self.starts = starting.read_starts(path)
        self.scores: Scores | None = None  # Set by `score`.
        self.notes = self._notes()

    def _notes(self) -> list[str]:
        """Returns what is missing or unusual."""
        notes, facts = [], self.recorded.facts
        if facts.simulated:
            notes.append("SIMULATED towers on one device: no measure of several GPUs.")
        if not facts.data_is_real:
            notes.append("Trained on the SYNTHETIC stand-in, which is NOT CIFAR-10.")
        if not self.saved:
            notes.append("There is no checkpoint yet.")
        damaged = (saved for saved in self.saved if "damage" in saved)
        notes += [f"DAMAGED checkpoint: {saved['damage']}." for saved in damaged]
        averages = self.saved[-1].get("averages", {}) if self.saved else {}
        said = divergence(self.recorded.config, averages)
        return [*notes, said] if said else notes

    @property
    def headline(self) -> tuple[str, dict[str, float]]:
        """The split and scores of `score`, or else of the last evaluation."""
        last = self.scored[-1] if self.scored else {}
        return ("test", self.tested) if self.tested else (self.split, last)

    @property
    def step(self) -> int:
        """The last step with a log line or a checkpoint; 0 if there is none."""
        lines = [*self.logged, *self.saved]
        return max((int(line["step"]) for line in lines), default=0)

    def score(
        self, device: str, step: str | None, trusted: str | None, data_dir: str | None
    ) -> None:
        """Scores the checkpoint of `step`, or the newest intact one.

        Raises:
            UsageError: The checkpoint, the model or the data cannot be used.
        """
        trained = TrainedModel(self.path, trust_model=trusted)
        restored = trained.restore(step)
        dataset = datasets.find_again(self.recorded, data_dir)
        scored = ScoredSet(trained.model, self.recorded.config, dataset, Options())
        values = trained.trainable, device, trained.temperature
        sums, scalars, outcomes, calibrated = scored.score(*values)
        hardest, names = _hardest(dataset, outcomes, trained), dataset.class_names
        self.scores = Scores(scored.subject, names, sums, hardest, calibrated)
        self.tested = {"step": restored, "num_examples": sums.count, **scalars}
        if self.split == "test" and datasets.is_of_run(dataset, self.recorded):
            self.scored = [*scores.merged_by_step([*self.scored, self.tested]).values()]


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Reads the runs in directories, each directory only once."""
    distinct = list(dict.fromkeys(path.resolve() for path in paths))
    common = os.path.commonpath([path.parent for path in distinct])
    return [ReportedRun(path, str(path.relative_to(common))) for path in distinct]


def _evaluations(run: Path, split: str) -> list[dict[str, float]]:
    return [*scores.merged_by_step(_lines(run / scores.log_of(split))).values()]


def _lines(path: Path) -> list[dict[str, float]]:
    """Returns the numbers in each line of a log that are small enough to plot."""

    def is_shown(value: Any) -> bool:
        return isinstance(value, int | float) and abs(value) <= _LARGEST

    lines = logs.read_steps(path)
    return [{k: v for k, v in line.items() if is_shown(v)} for line in lines]


def _checkpoints(directory: Path) -> list[dict[str, Any]]:
    """Returns the step of each checkpoint, with its time and size, or its damage."""
    saved: list[dict[str, Any]] = []
    for step in checkpoints.steps(directory):
        with contextlib.suppress(FileNotFoundError):  # A training run may delete it.
            try:
                manifest = checkpoints.verify(directory, step).manifest
                size = sum(each["bytes"] for each in manifest["files"].values())
                file = checkpoints.folder(directory, step) / checkpoints.MANIFEST
                saved_at = manifest.get("time", file.lstat().st_mtime)  # Not in 1.0.0.
                saved.append({"step": step, "time": saved_at, "size": size})
                saved[-1]["averages"] = manifest.get(checkpoints.AVERAGES, {})
            except UsageError as error:
                saved.append({"step": step, "damage": str(error)})
    return saved


def _hardest(
    dataset: datasets.Dataset, outcomes: Outcomes, trained: TrainedModel
) -> list[dict[str, Any]]:
    """Returns the test images with the largest losses, and their heat maps."""
    numbers = np.argsort(-outcomes.cross_entropy, kind="stable")[:_HARDEST]
    confidence = outcomes.at(trained.temperature).confidence  # As in `predict`.
    images, names = dataset.read("test")[0][numbers], dataset.paths.get("test")
    maps = heat_maps(trained, images, outcomes.predictions[numbers])
    drawn = [b""] * len(images) if maps is None else map(draw, images, maps)
    return [
        {
            "png": base64.b64encode(tf.io.encode_png(image).numpy()).decode(),
            "looks_at": base64.b64encode(heat).decode(),
            "name": names[number] if names else f"test image {number}",
            "true": dataset.class_names[outcomes.labels[number]],
            "predicted": dataset.class_names[outcomes.predictions[number]],
            "confidence": float(confidence[number]),
        }
        for number, image, heat in zip(numbers, images, drawn, strict=True)
    ]
