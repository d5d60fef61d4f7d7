"""A part of a data set on which a run is scored, and the logs of its scores."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar10.config.shared_options import SCORED_BATCH_SIZE
from cifar10.errors import UsageError
from cifar10.evaluation import metrics, scorer
from cifar10.input.datasets import Dataset
from cifar10.input.pipeline import evaluation_batches
from cifar10.run_directory import scores
from cifar10.run_directory.logs import writing

_FIX = "Make room there or make it writable, or name another place with --eval_dir."


class Result(NamedTuple):
    """The result of an evaluation."""

    sums: metrics.Sums
    scalars: dict[str, float]  # By the names that training uses.


class ScoredSet:
    """Images on which a model is scored at several steps of its training.

    `settings` are the content of the run's `config.json`. Scores are recorded in the
    folder `events`, by the training itself and by `eval.py` alike. They have a
    precision at each of `top_k`, besides 1 and 5.

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
        batch_size: int = SCORED_BATCH_SIZE,
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
        self._writer: tf.summary.SummaryWriter | None = None

    def score(
        self,
        trainable: Sequence[tf.Tensor],
        device: str,
        watch: Callable[[scorer.Outcomes], None] | None = None,
    ) -> Result:
        """Scores the model with values for its trainable variables, on a device.

        The arguments are those of `scorer.Scorer.score`.
        """
        sums, weight_decay = self._scorer.score(trainable, self._batches, device, watch)
        return Result(sums, sums.scalars(weight_decay, self._top_k))

    def open(self) -> None:
        """Opens an event file; raises a `DiskError` if that fails."""
        with writing(self.events, _FIX):
            self.events.mkdir(parents=True, exist_ok=True)
            self._writer = tf.summary.create_file_writer(str(self.events))

    def record(self, step: int, result: Result) -> str:
        """Writes a result to event file and log; returns a line about it.

        The event file gets no result of an earlier step than it has, since TensorBoard
        would no longer show those of later steps.

        Raises:
            DiskError: They cannot be written. The next call opens a new event file.
        """
        if self._writer is None:
            self.open()
        writer, self._writer = self._writer, None
        found = scores.read(self.events, result.sums.count)
        newest = max({**scores.read(self.events), **found}, default=0)
        with writing(self.events, _FIX):
            if step >= newest:
                self._write_events(writer, step, result)
            scores.append(self.events, step, result.scalars, result.sums.count)
        self._writer = writer
        return self.line(step, result, {at: found[at] for at in found if at < step})

    def line(self, step: int, result: Result, earlier: Mapping[int, float]) -> str:
        """Returns a line about a result, compared with scores of earlier steps."""
        classes = len(self.dataset.class_names)
        compared = metrics.headline(result.scalars["precision @ 1"], classes, earlier)
        return f"{datetime.now().astimezone():%H:%M:%S} step {step}: {compared}"

    def _write_events(
        self, writer: tf.summary.SummaryWriter, step: int, result: Result
    ) -> None:
        confusion, names = result.sums.confusion, self.dataset.class_names
        share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
        # Dark means many; enlarged so that small matrices can be seen.
        scale = max(1, 320 // len(share))
        picture = np.kron(1.0 - share, np.ones((scale, scale)))[None, :, :, None]
        notes = f"{self.subject} Rows true, columns predicted: {names}."
        with writer.as_default(step=step):
            for name, value in result.scalars.items():
                tf.summary.scalar(name, value)
            tf.summary.image("confusion_matrix", picture)
            tf.summary.text("evaluation", notes)
            writer.flush()
