"""A part of a data set on which a run is scored, and the logs of its scores."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.evaluation import metrics, scorer
from cifar10.evaluation.summaries import EvaluationSummaries
from cifar10.input.datasets import Dataset
from cifar10.input.evaluation import evaluation_batches
from cifar10.run_directory import scores


class Result(NamedTuple):
    """What an evaluation found."""

    sums: metrics.Sums
    scalars: dict[str, float]  # By the names that training uses.


class ScoredSet:
    """Images on which a model is scored at several steps of its training.

    `settings` are the content of the run's `config.json`. Scores are recorded in the
    folder `events`, by the training itself and by `eval.py` alike.

    Scores have a precision at each of `top_k`, besides 1 and 5.

    Attributes:
        events: The folder of the event files and of `metrics.jsonl`.
        dataset: The data set.
        count: Number of images.
        subject: Which images and which values of the variables are scored, in words.
    """

    def __init__(
        self,
        model: keras.Model,
        settings: Mapping[str, Any],
        dataset: Dataset,
        events: Path,
        *,
        split: Literal["test", "train"] = "test",
        num_examples: int | None = None,
        batch_size: int,
        use_averages: bool = True,
        test_time_augmentation: bool = False,
        top_k: Sequence[int] = (),
    ) -> None:
        for k in top_k:
            if k > dataset.classes:
                raise UsageError(
                    f"--top_k {k}: there are {dataset.classes} classes. Give at most "
                    "so many."
                )
        self._top_k = top_k
        self.events = events
        self.dataset = dataset
        self._scorer = scorer.Scorer(
            model, dataset.classes, test_time_augmentation=test_time_augmentation
        )
        images, labels = dataset.read(split)
        self.count = num_examples or len(images)
        if self.count > len(images):
            raise UsageError(
                f"--num_examples {self.count}: the set has {len(images):,} images."
            )
        self._batches = evaluation_batches(
            images,
            labels,
            min(batch_size, self.count),
            settings["distortions"],
            self.count,
        )
        variables = scorer.values_scored(settings, use_averages=use_averages)
        kind = "test" if split == "test" else "training"
        views = ", six views each" if test_time_augmentation else ""
        note = " Trained on simulated towers." if settings["simulated"] else ""
        self.subject = (
            f"{self.count:,} {kind} images of {dataset.description}; "
            f"{variables}{views}.{note}"
        )
        self._summaries: EvaluationSummaries | None = None

    def open(self) -> None:
        """Makes the folder of the scores; raises a `DiskError` if that fails."""
        self._summaries = EvaluationSummaries(self.events)

    def score(self, trainable: Sequence[tf.Tensor], device: str) -> Result:
        """Scores the model with values for its trainable variables, on a device."""
        sums, weight_decay = self._scorer.score(trainable, self._batches, device)
        return Result(sums, sums.scalars(weight_decay, self._top_k))

    def record(self, step: int, result: Result) -> str:
        """Writes a result to event files and log; returns a line about it.

        Raises:
            DiskError: They cannot be written, or read; the next call opens them anew.
        """
        summaries, self._summaries = self._summaries, None
        if summaries is None:
            summaries = EvaluationSummaries(self.events)
        found = scores.read(self.events, result.sums.count)
        names = self.dataset.class_names
        notes = f"{self.subject} Rows true, columns predicted: {names}."
        summaries.write(step, result.scalars, result.sums.confusion, notes)
        self._summaries = summaries
        return self.line(step, result, {at: found[at] for at in found if at < step})

    def line(self, step: int, result: Result, earlier: Mapping[int, float]) -> str:
        """Returns a line about a result, compared with scores of earlier steps."""
        classes = len(self.dataset.class_names)
        compared = metrics.headline(result.scalars["precision @ 1"], classes, earlier)
        return f"{datetime.now().astimezone():%H:%M:%S} step {step}: {compared}"
