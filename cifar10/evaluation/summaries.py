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
        """Writes the result of a checkpoint; `confusion` is that of `metrics.Sums`.

        Event files get no result of an earlier step than they have: TensorBoard would
        show nothing of the later ones any more.
        """
        count = int(confusion.sum())
        known = {**scores.read(self._events), **scores.read(self._events, count)}
        with writing(self._events, _FIX):
            if step >= max(known, default=0):
                self._write_events(step, scalars, confusion, notes)
            scores.append(self._events, step, scalars, count)

    def _write_events(
        self,
        step: int,
        scalars: Mapping[str, float],
        confusion: np.ndarray,
        notes: str,
    ) -> None:
        share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
        # Dark means many; enlarged so that small matrices can be seen.
        scale = max(1, 320 // len(share))
        picture = np.kron(1.0 - share, np.ones((scale, scale)))[None, :, :, None]
        with self._writer.as_default(step=step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
            tf.summary.image("confusion_matrix", picture)
            tf.summary.text("evaluation", notes)
            self._writer.flush()
