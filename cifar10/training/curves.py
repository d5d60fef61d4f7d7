"""The hook that writes TensorBoard's files and `metrics.jsonl`."""

import time
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from cifar10.config import options
from cifar10.config.config import ResolvedConfig
from cifar10.run_directory import layout
from cifar10.training.goodput import Goodput
from cifar10.training.hooks import Run, Summary
from cifar10.training.summaries import TrainSummaries


class Curves:
    """Writes what a training reports to its directory, with the seconds it took.

    What was written of steps beyond the one that a run resumes from is dropped.
    """

    def __init__(self, train_dir: Path, goodput: Goodput) -> None:
        self._files = (train_dir / layout.TRAIN_EVENTS, train_dir / layout.METRICS)
        self._goodput = goodput
        self._summaries: TrainSummaries | None = None

    def on_start(self, run: Run) -> None:
        """Opens the files, and describes a new run in them."""
        if self._summaries:
            self._summaries.close()
        self._summaries = TrainSummaries(*self._files, run.step)
        if run.step == 0:
            # TensorBoard's HParams panel compares what sets the result.
            names = options.result_determining(ResolvedConfig)
            self._summaries.describe(run.settings, names)

    def on_graph(self, graph: tf.Graph) -> None:
        """Writes the graph of a step."""
        self._opened.graph(graph)

    def on_summary(self, step: int, summary: Summary) -> None:
        """Writes histograms and images."""
        self._opened.histograms(step, summary.tensors)
        self._opened.weight_losses(step, summary.weight_losses)
        self._opened.activations(step, summary.activations)
        self._opened.images(step, summary.images)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one point of each curve."""
        seconds = self._goodput.seconds()
        self._opened.scalars(step, metrics, time=time.time(), seconds=seconds)

    def on_save(self, step: int) -> None:  # noqa: ARG002 - all that was written.
        """Flushes the curves to disk, so that none has a gap before a checkpoint."""
        self._opened.flush()

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Closes the files."""
        self._opened.close()

    @property
    def _opened(self) -> TrainSummaries:
        if self._summaries is None:
            raise RuntimeError("the training has not told of its start")
        return self._summaries
