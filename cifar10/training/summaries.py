"""The logs of a training: TensorBoard event files and `metrics.jsonl`.

Both show one curve after a resume: what was logged beyond the checkpoint that a run
resumes from is dropped, because those steps are run again.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api as hparams
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util import tensor_util

from cifar10.errors import DiskError, say
from cifar10.process import regular_files
from cifar10.run_directory import claim
from cifar10.run_directory.event_files import forget_later, writing
from cifar10.training.histograms import buckets, sample

# Distorted images shown in TensorBoard: enough to see how they vary.
_SAMPLE_IMAGES = 8

_HISTOGRAM = histogram_metadata.create_summary_metadata(None, None)


class TrainSummaries:
    """Writes the event files and `metrics.jsonl` of a training.

    Use it as a context manager. The run resumes from `resumed_step`, 0 for a new one.
    A disk that fails is a warning, and what is logged until it works again is lost.
    """

    def __init__(self, events: Path, metrics: Path, resumed_step: int) -> None:
        self._directory = metrics.parent
        self._place = claim.Place(metrics.parent)
        self._events = events
        self._metrics = metrics
        self._resumed_step: int | None = resumed_step  # None once the logs end there.
        self._failed = False
        with self._writing():
            self._open()

    def _open(self) -> None:
        if self._resumed_step is not None:
            forget_later(self._events, self._metrics, self._resumed_step)
            self._resumed_step = None
        self._writer = tf.summary.create_file_writer(str(self._events))

    def scalars(self, step: int, values: Mapping[str, float], **facts: Any) -> None:
        """Writes scalars to both, one line of `metrics.jsonl` a call, and facts there.

        JSON has only null for numbers that are not finite; event files leave them out.
        """
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, **facts, **dict.fromkeys(values), **finite}
        summary = summary_pb2.Summary()
        for name, value in finite.items():
            if abs(value) <= float(tf.float32.max):  # All that an event file can hold.
                summary.MergeFrom(scalar_pb(name, value))
        with self._at(step):
            self._append(f"{json.dumps(line)}\n".encode())
            _write(step, summary)

    def histograms(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Writes one histogram per named tensor, of evenly chosen values if large."""
        summary = summary_pb2.Summary()
        for name, value in values.items():
            summary.MergeFrom(_histogram_pb(name, sample(value).numpy()))
        with self._at(step):
            _write(step, summary)

    def weight_losses(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Writes what each variable adds to the loss."""
        summary = summary_pb2.Summary()
        for name, value in values.items():
            summary.MergeFrom(scalar_pb(name, float(value)))
        with self._at(step):
            _write(step, summary)

    def activations(self, step: int, samples: Mapping[str, np.ndarray]) -> None:
        """Writes histogram and sparsity, the part that is zero, of samples of each."""
        summary = summary_pb2.Summary()
        for name, values in samples.items():
            summary.MergeFrom(_histogram_pb(f"activations/{name}", values))
            summary.MergeFrom(scalar_pb(f"sparsity/{name}", np.mean(values == 0)))
        with self._at(step):
            _write(step, summary)

    def images(self, step: int, images: tf.Tensor) -> None:
        """Writes the first of some standardized images, each stretched to 0 to 1."""
        images = tf.cast(images[:_SAMPLE_IMAGES], tf.float32)
        low = tf.reduce_min(images, axis=[1, 2, 3], keepdims=True)
        high = tf.reduce_max(images, axis=[1, 2, 3], keepdims=True)
        shown = tf.math.divide_no_nan(images - low, high - low)
        with self._at(step):
            tf.summary.image("distorted_images", shown, max_outputs=_SAMPLE_IMAGES)

    def graph(self, graph: tf.Graph) -> None:
        """Writes the graph of a training step."""
        with self._at(0):
            tf.summary.graph(graph)

    def describe(
        self, settings: Mapping[str, Any], hyperparameters: Sequence[str]
    ) -> None:
        """Writes the configuration, and for HParams those that determine the result."""
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        with self._at(0):
            tf.summary.text("config", table)
            hparams.hparams(
                # The panel accepts neither None nor tables.
                {
                    k: settings[k]
                    for k in hyperparameters
                    if not isinstance(settings[k], list | dict | None)
                },
                trial_id=str(settings["train_dir"]),
            )

    def flush(self) -> None:
        """Waits until everything is in the files, and reopens those that failed."""
        self._retry()
        with self._writing():
            self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is left, and closes the event file."""
        with self._writing():
            self._writer.close()

    def _append(self, line: bytes) -> None:
        """Writes a complete line or nothing."""
        if problem := self._place.problem():
            raise OSError(errno.ESTALE, problem)
        # Unbuffered, so that a full disk is noticed when writing.
        with regular_files.opened(self._metrics, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                # A disk with room for a part of it takes that part without an error.
                while line:
                    line = line[file.write(line) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    def _retry(self) -> None:
        """Opens another event file if the last one failed: its end may be torn."""
        # A directory that has vanished is not created again.
        if not self._failed or self._place.problem() or not self._directory.is_dir():
            return
        with contextlib.suppress(OSError, tf.errors.OpError):
            for path in self._events.glob("*"):
                if not path.stat().st_size:  # The last attempt could not write more.
                    path.unlink()
            self._open()
            self._failed = False
            say(f"The event files and logs in {self._directory} are written again.")

    @contextlib.contextmanager
    def _at(self, step: int) -> Iterator[None]:
        self._retry()
        with self._writing(), self._writer.as_default(step=step):
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns a failing disk into a warning."""
        try:
            with writing(self._directory):
                yield
        except DiskError as error:
            if not self._failed:
                loss = "The training continues; what it logs meanwhile is lost."
                say(f"{error.what} {loss}")
            self._failed = True
            self._writer = tf.summary.create_noop_writer()


def _histogram_pb(name: str, values: np.ndarray) -> summary_pb2.Summary:
    summary = summary_pb2.Summary()
    counted = tensor_util.make_tensor_proto(buckets(values))
    summary.value.add(tag=name, metadata=_HISTOGRAM, tensor=counted)
    return summary


def _write(step: int, summary: summary_pb2.Summary) -> None:
    """Writes summaries in one operation, where one for each would take longer."""
    tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step)
