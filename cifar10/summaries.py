"""What a run leaves to look at: TensorBoard event files and `metrics.jsonl`.

Both are one curve after a resume: what was logged beyond the checkpoint that a run
resumes from is taken back, because those steps are run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.hparams import api as hparams
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cifar10.errors import UsageError

# Distorted images shown in TensorBoard, as many as its image panel lays in a row.
_SAMPLE_IMAGES = 8


class TrainSummaries:
    """Writes the event files and `metrics.jsonl` of a training.

    Use it as a context manager, or call `close`.

    Args:
        events: Folder of the event files.
        metrics: Path of `metrics.jsonl`.
        resumed_step: The step that the run goes on from; 0 for a new one.

    Raises:
        UsageError: A file cannot be written.
    """

    def __init__(self, events: Path, metrics: Path, resumed_step: int) -> None:
        self._metrics_path = metrics
        try:
            if resumed_step:
                _mark_resume(events, resumed_step)
            self.taken_back = _take_back(metrics, resumed_step)
            self._metrics = metrics.open("a", encoding="utf-8")
            self._writer = tf.summary.create_file_writer(str(events))
        except (OSError, tf.errors.OpError) as error:
            raise _unwritable(metrics.parent, error) from error

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes scalars to both; one line of `metrics.jsonl` a call.

        Args:
            step: The step.
            values: Scalars by name; None for one that has no value yet.
        """
        line = json.dumps({"step": step, **values})
        try:
            self._metrics.write(line + "\n")
            self._metrics.flush()
        except OSError as error:
            raise _unwritable(self._metrics_path, error) from error
        with self._writer.as_default(step=step):
            for name, value in values.items():
                if value is not None:
                    tf.summary.scalar(name, value)

    def histograms(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Writes one histogram per named tensor."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.histogram(name, value)

    def activations(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Writes histogram and sparsity, the part that is zero, of each activation."""
        self.histograms(
            step, {f"activations/{name}": value for name, value in values.items()}
        )
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(f"sparsity/{name}", tf.math.zero_fraction(value))

    def images(self, step: int, images: tf.Tensor) -> None:
        """Writes the first of some standardized images, each stretched to 0 to 1.

        Args:
            step: The step.
            images: floating [batch, height, width, 3].
        """
        images = tf.cast(images[:_SAMPLE_IMAGES], tf.float32)
        low = tf.reduce_min(images, axis=[1, 2, 3], keepdims=True)
        high = tf.reduce_max(images, axis=[1, 2, 3], keepdims=True)
        shown = tf.math.divide_no_nan(images - low, high - low)
        with self._writer.as_default(step=step):
            tf.summary.image("distorted_images", shown, max_outputs=_SAMPLE_IMAGES)

    def describe(self, settings: Mapping[str, Any], graph: tf.Graph) -> None:
        """Writes the configuration, as text and as hyperparameters, and the graph."""
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        flat = {
            name: value
            for name, value in settings.items()
            if isinstance(value, bool | int | float | str)
        }
        with self._writer.as_default(step=0):
            tf.summary.text("config", table)
            tf.summary.graph(graph)
            hparams.hparams(flat, trial_id=str(settings["train_dir"]))

    def flush(self) -> None:
        """Waits until all that was written is in the files."""
        try:
            self._writer.flush()
        except tf.errors.OpError as error:
            raise _unwritable(self._metrics_path.parent, error) from error

    def close(self) -> None:
        """Flushes and closes the files."""
        self.flush()
        self._writer.close()
        self._metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


class LossAverages:
    """Moving averages of the losses, as in the tutorial: smoother curves to read.

    Args:
        values: Averages to go on from, by name; empty for a new run.
    """

    DECAY = 0.9  # The tutorial's.

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = dict(values)

    def update(self, losses: Mapping[str, float]) -> None:
        """Takes in the losses of one step; the first ones start the averages."""
        for name, loss in losses.items():
            before = self.values.get(name, loss)
            self.values[name] = self.DECAY * before + (1 - self.DECAY) * loss


def _mark_resume(events: Path, resumed_step: int) -> None:
    """Tells TensorBoard to forget what was written beyond `resumed_step`.

    The mark stands in a file of its own, made before the run's next event file so that
    TensorBoard, which reads files by name, meets it first. Its suffix sorts before
    TensorFlow's `.v2` where both are made in one second.
    """
    writer = EventFileWriter(str(events), filename_suffix=".resume")
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer.add_event(event_pb2.Event(step=resumed_step + 1, session_log=start))
    writer.close()


def _take_back(metrics: Path, resumed_step: int) -> int:
    """Drops the lines of later steps, and a torn last one; returns their number."""
    if not metrics.exists():
        return 0
    kept, dropped = [], 0
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            keep = json.loads(line)["step"] <= resumed_step
        except (ValueError, KeyError, TypeError):
            keep = False
        kept += [line] if keep else []
        dropped += not keep
    if dropped:
        temporary = metrics.with_name(f".{metrics.name}-{os.getpid()}")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(metrics)
    return dropped


def _unwritable(path: Path, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return UsageError(
        f"{path} cannot be written: {reason}. The last checkpoint is kept; make room "
        "or writable, then give the same command again."
    )


class EvaluationSummaries:
    """Writes the event files of an evaluation, under the training's tags.

    Args:
        events: Folder of the event files.
    """

    def __init__(self, events: Path) -> None:
        try:
            events.mkdir(parents=True, exist_ok=True)
            self._writer = tf.summary.create_file_writer(str(events))
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(
                f"--eval_dir {events} cannot be written: "
                f"{getattr(error, 'strerror', None) or error}."
            ) from error

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        confusion: np.ndarray,
        notes: str,
    ) -> None:
        """Writes one evaluation.

        Args:
            step: The checkpoint's step.
            scalars: By tag.
            confusion: int64 [classes, classes], rows are the true classes.
            notes: What the user must know of it, such as that the data is synthetic.
        """
        share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
        # Light is few, dark is many; enlarged so that small matrices can be seen.
        scale = max(1, 320 // len(share))
        picture = np.kron(1.0 - share, np.ones((scale, scale)))[None, :, :, None]
        with self._writer.as_default(step=step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
            tf.summary.image("confusion_matrix", picture)
            tf.summary.text("evaluation", notes)
        self._writer.flush()
