"""Scores the checkpoints of a run, once or as they come.

All that is needed is the run's directory: the model and the data set come from its
`config.json`.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cifar10.config import config_file
from cifar10.errors import UsageError
from cifar10.evaluation import metrics, scoring
from cifar10.evaluation.options import Options
from cifar10.evaluation.summaries import EvaluationSummaries
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets, pipeline
from cifar10.run_directory import checkpoints, layout, readers
from cifar10.towers import devices

_SPLITS: dict[str, Literal["test", "train"]] = {"test": "test", "train_eval": "train"}


def run(options: Options) -> None:
    """Scores checkpoints as `options` say, until the training has finished.

    Raises:
        UsageError: There is nothing to score, or something stands in the way.
    """
    device = devices.place_evaluation(options.device)
    directory = layout.locate(options.checkpoint_dir)
    evaluator: _Evaluator | None = None
    described: bytes | None = None
    scored: int | None = None
    told: set[str] = set()
    while True:
        newest = _newest(directory, scored, told)
        description = layout.description(directory)
        if newest is not None and description is not None:
            # The training does not delete it meanwhile.
            with readers.reading(newest.path / checkpoints.MANIFEST):
                if evaluator is None or description != described:
                    # The first one, or another run or session has begun here since.
                    evaluator, described = _Evaluator(options, device), description
                try:
                    evaluator.score(newest)
                except FileNotFoundError:
                    vanished = "vanished while it was read."
                    _tell(f"The checkpoint of step {newest.step} {vanished}")
                    continue
            scored = newest.step
        if options.run_once:
            if scored is None:
                raise UsageError(_nothing_to_score(directory))
            return
        if scored is not None and scored >= _max_steps(directory):
            _tell(f"The training has finished at step {scored}.")
            return
        waiting = (
            _nothing_to_score(directory)
            if scored is None
            else f"Waiting for a checkpoint after step {scored} in {directory}."
        )
        _tell(f"{waiting} Looking every {options.eval_interval_secs:g} s.", told)
        time.sleep(options.eval_interval_secs)


def _newest(
    directory: Path, scored: int | None, told: set[str]
) -> checkpoints.Checkpoint | None:
    """Returns the newest intact checkpoint, unless it is the one scored last."""
    folder = directory / layout.CHECKPOINTS
    described = layout.description(directory) is not None
    if not described or checkpoints.steps(folder)[-1:] == [scored]:
        return None
    newest, damaged = checkpoints.newest_intact(folder)
    for step, reason in damaged.items():
        _tell(f"PASSING OVER the damaged checkpoint of step {step}: {reason}.", told)
    return None if newest is None or newest.step == scored else newest


def _max_steps(directory: Path) -> int:
    """Returns the step that the training is to reach; a resume may have raised it."""
    return config_file.read(directory / layout.CONFIG)["max_steps"]


def _nothing_to_score(directory: Path) -> str:
    if not directory.is_dir():
        return (
            f"--checkpoint_dir {directory} does not exist; no training has begun there."
        )
    if not (directory / layout.CONFIG).exists():
        return (
            f"--checkpoint_dir {directory} holds no run: there is no "
            f"{layout.CONFIG} of train.py or train_multi_gpu.py in it."
        )
    return f"There is no checkpoint in {directory} yet; the training writes the first."


def _tell(sentence: str, told: set[str] | None = None) -> None:
    """Says something about the evaluation on stderr, where no result goes.

    With `told`, the sentences said so far, nothing is said twice.
    """
    if told is None or sentence not in told:
        print(sentence, file=sys.stderr, flush=True)
    if told is not None:
        told.add(sentence)


class _Evaluator:
    """The model and the images of one run, ready to score its checkpoints."""

    def __init__(self, options: Options, device: str) -> None:
        directory = layout.locate(options.checkpoint_dir)
        self.options = options
        self.device = device
        self.trained = TrainedModel(directory)
        self.settings = self.trained.settings
        self.dataset = datasets.find_again(
            self.settings["data"],
            self.settings["data_dir"],
            self.settings["data_url"],
            options.data_dir,
        )
        self.scorer = scoring.Scorer(
            self.trained.model,
            self.dataset.classes,
            test_time_augmentation=options.test_time_augmentation,
        )
        images, labels = self.dataset.read(_SPLITS[options.eval_data])
        count = options.num_examples or len(images)
        if count > len(images):
            raise UsageError(
                f"--num_examples {count}: the set has {len(images):,} images."
            )
        self.batches = pipeline.evaluation_batches(
            images[:count],
            labels[:count],
            min(options.batch_size, count),
            self.settings["distortions"],
        )
        self.summaries = EvaluationSummaries(
            layout.locate(options.eval_dir)
            if options.eval_dir
            else directory / options.curve
        )

    def score(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Scores one checkpoint, prints the result and writes it for others."""
        self.trained.load(checkpoint)
        used = self.trained.values(use_averages=self.options.use_averages)
        sums, weight_decay = self.scorer.score(used, self.batches, [self.device])
        scalars = sums.scalars(weight_decay)
        what = self._what(sums)
        names = self.dataset.class_names
        notes = f"{what} Confusion matrix: rows true, columns predicted: {names}."
        self.summaries.write(checkpoint.step, scalars, sums.confusion, notes)
        if self.options.json:
            print(json.dumps(self._as_json(checkpoint.step, sums, scalars)), flush=True)
        else:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            title = f"{now}: step {checkpoint.step}"
            print(metrics.report(title, what, sums, scalars, names), flush=True)

    def _what(self, sums: metrics.Sums) -> str:
        kind = "averaged" if self.options.use_averages else "raw"
        images = "test" if self.options.eval_data == "test" else "training"
        views = ", six views each" if self.options.test_time_augmentation else ""
        simulated = (
            " Trained on simulated towers." if self.settings["simulated"] else ""
        )
        return (
            f"{sums.count:,} {images} images of {self.dataset.description}; "
            f"{kind} variables{views}.{simulated}"
        )

    def _as_json(
        self, step: int, sums: metrics.Sums, scalars: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "data": self.dataset.name,
            "data_is_real": self.dataset.is_real,
            "eval_data": self.options.eval_data,
            "use_averages": self.options.use_averages,
            "test_time_augmentation": self.options.test_time_augmentation,
            "simulated": self.settings["simulated"],
            "num_examples": sums.count,
            "correct": sums.correct,
            **scalars,
            "per_class": sums.per_class(self.dataset.class_names),
            "confusion": np.asarray(sums.confusion).tolist(),
        }
