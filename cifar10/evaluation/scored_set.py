"""Scores a model on every image of a split exactly once, and logs the scores."""

import contextvars
import functools
import operator
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar10.config.fields import CALIBRATED, BaseConfig
from cifar10.config.python_objects import OwnMetrics
from cifar10.errors import UsageError, say
from cifar10.evaluation import metrics
from cifar10.evaluation.eval_options import Options
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.distortions import prepare
from cifar10.input.pipeline import in_graph, take, without_autotuning
from cifar10.layers import fuses_activations
from cifar10.model import inference
from cifar10.process import moving_line
from cifar10.run_directory import logs, scores
from cifar10.towers.graphs import traced

_FIX = "Free space or make the folder writable, or name another one with --eval_dir."


class Scorer:
    """Scores a model any number of times, but traces the model only once.

    `score` takes the trainable variables' values; all other values are the model's own.
    With `test_time_augmentation`, it averages the logits of an image's six `views`.
    """

    def __init__(self, model: keras.Model, *, test_time_augmentation: bool = False):
        self._model, self._augment = model, test_time_augmentation
        self._score = traced(self._trace_score)

    def score(
        self, trainable: Sequence[tf.Tensor], batches: tf.data.Dataset, device: str
    ) -> tuple[metrics.Outcomes, float]:
        """Scores the model on a device, with given values of the trainable variables.

        `batches` are made by `evaluation_batches`. Returns the outcomes of the images
        that the masks in `batches` select, in order, and the penalties.
        """
        values = [tf.convert_to_tensor(value) for value in trainable]
        found = []
        total = int(batches.cardinality())
        with moving_line.counting("Scoring batches", total) as advance:
            for number, (images, labels, mask) in enumerate(batches):
                advance(number)
                with tf.device(device):
                    each, penalties = self._score(values, images, labels)
                chosen = mask.numpy()
                found.append([tensor.numpy()[chosen] for tensor in (labels, *each)])
        columns = map(np.concatenate, zip(*found, strict=True))
        return metrics.Outcomes(*columns), float(penalties)

    def _trace_score(
        self, values: list[tf.Tensor], images: tf.Tensor, labels: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], tf.Tensor]:
        """Computes the fields of `Outcomes` after `labels`, and the penalties."""
        logits, penalties = self._logits(values, images)
        own = tf.gather(logits, labels, batch_dims=1)
        rank = tf.math.count_nonzero(logits > own[:, None], axis=1)
        is_finite = tf.reduce_all(tf.math.is_finite(logits), axis=1)
        wrong = (tf.cast(labels, tf.int64) + 1) % logits.shape[1]
        return (
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits),
            tf.where(is_finite, tf.argmax(logits, axis=1), wrong),
            tf.where(is_finite, rank, logits.shape[1]),
            tf.cast(tf.reduce_max(tf.nn.softmax(logits), axis=1), tf.float32),
            logits,
        ), tf.add_n(list(penalties)) if penalties else tf.constant(0.0)

    def _logits(
        self, values: list[tf.Tensor], images: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns float32 or float64 logits, and the model's penalties."""
        parts, context = [], contextvars.copy_context()
        context.run(fuses_activations.set, True)
        for view, weight in views(images) if self._augment else [(images, 1.0)]:
            given = values, self._model.non_trainable_variables, view
            found = context.run(inference, self._model, *given, training=False)
            logits, _, penalties = found
            parts.append(logits * weight)
        return functools.reduce(operator.add, parts), penalties


def evaluation_batches(
    images: Images,
    labels: np.ndarray,
    batch_size: int,
    distortion: str = "tutorial",
    count: int | None = None,
) -> tf.data.Dataset:
    """Makes batches (images, labels, mask) of a split, in order and each image once.

    With a `count`, only the first `count` images are read. `images`, uint8 [total,
    height, width, channels], are prepared for a model trained with `distortion`.

    The last batch is padded with copies of the last image, so that all batches have the
    same shape. The mask, bool [batch_size], is False for these copies.
    """
    count = len(images) if count is None else count
    all_images = in_graph(images)
    with tf.device("/cpu:0"):
        all_labels = tf.constant(labels)

    @tf.autograph.experimental.do_not_convert  # There is nothing to convert.
    def batch_at(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        positions = first + tf.range(batch_size, dtype=tf.int64)
        chosen = tf.minimum(positions, count - 1)
        prepared = prepare(take(all_images, chosen), distortion)
        return prepared, tf.gather(all_labels, chosen), positions < count

    firsts = tf.data.Dataset.range(0, count, batch_size)
    return without_autotuning(firsts.map(batch_at, num_parallel_calls=2).prefetch(2))


def views(images: tf.Tensor) -> list[tuple[tf.Tensor, float]]:
    """Returns six views of each image and their weights, as in airbench94.

    The views are the image, the image shifted up and left by a pixel, and the image
    shifted down and right, each also mirrored. The two unshifted views weigh as much
    as the four others. `images` are floating [batch, height, width, channels].
    """
    _, height, width, _ = images.shape
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    up_left, down_right = padded[:, 2:, 2:], padded[:, :height, :width]
    moved = [(images, 0.25), (up_left, 0.125), (down_right, 0.125)]
    return [
        (seen, weight)
        for view, weight in moved
        for seen in (view, tf.reverse(view, axis=[2]))
    ]


class Result(NamedTuple):
    """The result of an evaluation."""

    sums: metrics.Sums
    scalars: dict[str, float]  # By the names that training uses.
    outcomes: metrics.Outcomes
    calibrated: metrics.Sums | None  # At the temperature; None if it is 1.


class ScoredSet:
    """A set of images on which a model is scored at several steps of training.

    The `config` is the run's.

    Attributes:
        split: The split of the data set that the images belong to.
        subject: Says which images are scored, and whether with averaged variables.
    """

    def __init__(
        self,
        model: keras.Model,
        config: BaseConfig,
        dataset: Dataset,
        scoring: Options,
        own_metrics: OwnMetrics | None = None,
    ) -> None:
        self.dataset, self._own_metrics = dataset, own_metrics
        self.split, augment = scoring.split, scoring.test_time_augmentation
        self._scorer = Scorer(model, test_time_augmentation=augment)
        if self.split == "val" and "val" not in dataset.splits:
            why = f"{dataset.description} has no val split"
            raise UsageError(f"{why}. Train with --val_fraction.")
        images, labels = dataset.read(self.split)
        if (count := scoring.num_examples or len(images)) > len(images):
            why = f"there are only {len(images):,} images"
            raise UsageError(f"--num_examples {count}: {why}.")
        seen, of = len(np.unique(labels[:count])), len(np.unique(labels))
        if seen < of and (np.diff(labels) >= 0).all():  # Folders are read by class.
            what = f"--num_examples {count}: the images are sorted by class"
            say(f"Note: {what}, so the scores are of {seen} of {of} classes.")
        size, distortion = min(scoring.batch_size, count), config.images.distortions
        self._batches = evaluation_batches(images, labels, size, distortion, count)
        is_averaged = scoring.use_averages and config.update.moving_average_decay != 0
        variables = "averaged variables" if is_averaged else "the variables themselves"
        kind = "training" if self.split == "train" else self.split
        how = f"{variables}, six views each" if augment else variables
        self.subject = f"{count:,} {kind} images of {dataset.description}; {how}."
        # Only the user's program can compute it.
        self._has_own_loss = config.loss.loss is not None
        self._writer: tf.summary.SummaryWriter | None = None

    def score(
        self, trainable: Sequence[tf.Tensor], device: str, temperature: float = 1.0
    ) -> Result:
        """Scores the model on a device, with given values of the trainable variables.

        A `temperature` other than 1 is added to the scores, with its calibration error.
        """
        outcomes, penalties = self._scorer.score(trainable, self._batches, device)
        sums = metrics.Sums.of(outcomes, self.dataset.classes)
        scalars = sums.scalars(penalties)
        if self._has_own_loss:
            del scalars["total_loss"]
        if self._own_metrics:
            labels = tf.constant(outcomes.labels, tf.int64)  # As in training.
            own = self._own_metrics(labels, tf.constant(outcomes.logits))
            scalars |= {name: float(np.mean(own[name])) for name in own}
        calibrated = None
        if temperature != 1.0:
            calibrated = metrics.Sums.of(outcomes.at(temperature), self.dataset.classes)
            scalars["temperature"] = temperature
            scalars[CALIBRATED] = calibrated.calibration_error
        return Result(sums, scalars, outcomes, calibrated)

    def close(self) -> None:
        """Closes the event file; the next result goes to a new one."""
        self._writer = None

    def record(self, events: Path, step: int, result: Result) -> None:
        """Writes a result to files in a folder. A `DiskError` ends the event file."""
        writer, self._writer = self._writer, None
        with logs.writing(events, _FIX):
            if writer is None:
                events.mkdir(parents=True, exist_ok=True)
                writer = tf.summary.create_file_writer(str(events))
            with writer.as_default(step=step):  # Flushes at its end.
                for name, value in result.scalars.items():
                    tf.summary.scalar(name, value)
            entry = {**result.scalars, "part": self.split}
            scores.append(events, step, entry, result.sums.count)
        self._writer = writer

    def line(self, step: int, result: Result) -> str:
        """Returns a line on a result, with the time of day."""
        classes = len(self.dataset.class_names)
        score = metrics.headline(result.scalars, result.sums.count, classes)
        on = f" on {self.split}" if "val" in self.dataset.splits else ""
        return f"{datetime.now().astimezone():%H:%M:%S} step {step}{on}: {score}"
