"""Retrains steps of a run with a change, to show how the run would have differed.

A replay without a change ends where the run did, bit for bit or within known rounding;
that is the control. So whatever differs after a replay with a change is its effect, on
these steps: over hundreds of them any difference grows, since training is chaotic.
Deletion by replay: "Unlearning at Scale" (https://arxiv.org/abs/2508.12220).
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cifar10.config import layout
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.evaluation.scored_set import Result
from cifar10.input.dataset_base import selected
from cifar10.input.regrouping import stand_ins
from cifar10.run_directory import logs, starting
from cifar10.run_directory.lock import RunLock, explaining_errors
from cifar10.towers.class_weights import resolve_class_weights
from cifar10.towers.towers import Loss
from cifar10.towers.update import Update
from cifar10.training.assembly import Training, build_tower, build_update
from cifar10.training.progress import Progress
from cifar10.training.replay import Difference, Replay


class Outcome(NamedTuple):
    """The outcome of recomputed steps."""

    weights: dict[int, np.ndarray]  # All trainable ones by step, floating [parameters].
    logged: list[dict[str, float]]  # What a run logs of each step.
    result: Result  # On the validation split, with the averaged weights.


class WhatIf(Replay):
    """Recomputes a window of a run's steps, as they were and with changes."""

    def check_recorded(self, first: int, last: int) -> None:
        """Refuses steps without a record with which `control` could compare them."""
        if last > (most := max([0, *self.logged, *self.saved])):
            raise UsageError(f"No record goes beyond step {most}. Give steps up to it.")
        recorded = {*self.logged} if self.bound else {*self.logged, *self.saved}
        if not recorded & {*range(first, last + 1)}:
            raise UsageError(f"No step from {first} to {last} is logged. Give more.")

    def control(self, first: int, last: int, until: int) -> Difference:
        """Recomputes steps unchanged; returns their worst difference from the run.

        A change will be made in the steps `first` to `last`, and followed to `until`.
        """
        self.check_recorded(first, until)
        self._first, self._last, self._until = first, last, until
        found: list[Difference] = []
        self.drawn: set[int] = set()  # Indices of pictures in the window's batches.

        def compared() -> Iterator[dict[str, float]]:
            for batches in self.steps(first, until):
                if self.step + 1 == first:
                    values = [(v, v.read_value()) for v in self._state.variables()]
                    counts = self.step, {**self._averages}, self._skipped, self._share
                    self._begin = values, counts
                if self.step < last:
                    self.drawn.update(self.next_pictures().tolist())
                metrics = self.advance(batches)
                found.extend(self._compare_line(metrics))
                if self.step in self.saved and not self.bound:
                    found.extend(self._compare_checkpoint())
                yield metrics

        self.unchanged = self._outcome(compared())  # Of the steps as they were.
        return max(found)

    def change(self, labels: np.ndarray, settings: Mapping[str, Any]) -> Outcome:
        """Recomputes the steps with other training labels and settings of the update.

        A label of -1 leaves a picture out, as `stand_ins` says. Needs `control`.
        """
        training = self.training
        update, loss = before = training.towers.update, training.towers.tower.loss
        variables, (self.step, averages, self._skipped, self._share) = self._begin
        self._averages = {**averages}
        for variable, value in variables:
            variable.assign(value)
        indices = stand_ins(training.labels, labels)
        changed = dataclasses.replace(
            training,
            config=training.config.with_values(**settings),
            images=selected(training.images, indices),
            labels=np.where(labels < 0, training.labels, labels)[indices],
        )
        if settings:
            update = build_update(changed.config, len(labels))
        given, names = changed.config.loss, training.dataset.class_names
        if given.class_weights and (changed.labels != training.labels).any():
            weights = resolve_class_weights(given.class_weights, changed.labels, names)
            loss = build_tower(given, class_weights=weights).loss

        def computed() -> Iterator[dict[str, float]]:
            try:
                self._train_as(changed, update, loss)
                yield from map(self.advance, self.onward(self._first, self._last))
            finally:
                self._train_as(training, *before)
            yield from map(self.advance, self.onward(self._last + 1, self._until))

        return self._outcome(computed())

    def _train_as(self, training: Training, update: Update, loss: Loss) -> None:
        towers, self.training = training.towers, training
        optimizer = self._state.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # In float16.
        if hasattr(optimizer, "highest_rate"):
            optimizer.highest_rate = training.config.update.learning_rate
        if towers.update is not update or towers.tower.loss is not loss:
            towers.update, towers.tower.loss = update, loss
            towers.freeze(towers.tower.frozen)  # Retraces the step.

    def _outcome(self, steps: Iterator[dict[str, float]]) -> Outcome:
        marks = np.linspace(self._first, self._until, 5).astype(int)
        weights, logged = {}, []
        for metrics in steps:
            logged.append(metrics)
            if self.step in marks:
                trained = self._state.model.trainable_variables
                weights[self.step] = np.concatenate([np.ravel(one) for one in trained])
        scored = self._scored_set(self.training.dataset.validation_split, None)
        device = self.training.towers.devices[0]
        return Outcome(weights, logged, scored.score(self._state.averages, device))

    def save(self, path: Path, record: Mapping[str, str], outcome: Outcome) -> None:
        """Writes the state reached as a run of its own, marked by `record`."""
        entries = {**self.recorded.entries, "train_dir": str(path), "what_if": record}
        entries["data_description"] += f"; {record['change']}"
        run = RecordedRun.of(path, entries)
        with RunLock(path) as lock:
            starting.start_run(run, None, lock, fresh=False)
        starting.record_start(run, self._first - 1)
        for number, found in enumerate(outcome.logged, self._first):
            line = {"step": number, "time": time.time(), **found}
            logs.append_line(path / layout.METRICS, line)
        scored = self._scored_set(self.training.dataset.validation_split, None)
        events = path / layout.evaluation_events(scored.split)
        scored.record(events, self.step, outcome.result)
        progress = Progress(dataclasses.replace(self.training, train_dir=path))
        progress.step, progress.left_out = self.step, self._batch - self.step
        progress.metric_averages, progress.skipped_steps = self._averages, self._skipped
        progress.save()

    def compare_saved(self, path: Path) -> Difference:
        """Compares the state reached with the checkpoint of a run that `save` wrote."""
        self._directory, self.saved = path / layout.CHECKPOINTS, [self.step]
        with explaining_errors(path):
            return max(self._compare_checkpoint())
