"""Event files and logs of an evaluation, for TensorBoard and for programs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar10.run_directory import scores
from cifar10.run_directory.event_files import writing

_FIX = "Make room there or make it writable, or name another place with --eval_dir."


class EvaluationSummaries:
    """Writes event files and `metrics.jsonl`, by the training's tags, to one folder."""

    def __init__(self, events: Path) -> None:
        self._events = events
        with writing(events, _FIX):
            events.mkdir(parents=True, exist_ok=True)
            self._writer = tf.summary.create_file_writer(str(events))

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        confusion: np.ndarray,
        notes: str,
    ) -> None:
        """Writes the result of a checkpoint; `confusion` is that of `metrics.Sums`."""
        share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
        # Dark means many; enlarged so that small matrices can be seen.
        scale = max(1, 320 // len(share))
        picture = np.kron(1.0 - share, np.ones((scale, scale)))[None, :, :, None]
        with writing(self._events, _FIX), self._writer.as_default(step=step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
            tf.summary.image("confusion_matrix", picture)
            tf.summary.text("evaluation", notes)
            self._writer.flush()
            scores.append(self._events, step, scalars, int(confusion.sum()))
