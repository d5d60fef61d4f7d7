"""Scores the model between two steps, as `eval.py` scores checkpoints (`--eval_steps`).

It computes with the averaged variables where they are, on the first tower's device and
in batches of a tower's size, which fit there because a step does. It reads the state of
the training and draws no number, so the steps are those of a training without it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.config.shared_options import SCORED_BATCH_SIZE
from cifar10.errors import DiskError, say
from cifar10.evaluation.scored_set import Result, ScoredSet
from cifar10.input.datasets import Dataset
from cifar10.run_directory import claim, layout
from cifar10.run_directory.event_files import forget_later, writing
from cifar10.towers.train_state import TrainState
from cifar10.training.progress import Progress


class Validation:
    """The scores of a training on the test set, in the run's folder `eval`.

    It scores every `period` steps, in batches of `batch_size` images if that is no
    waste. A disk that fails costs the records, with a warning, and nothing else.
    `settings` are the content of the run's `config.json`.
    """

    def __init__(
        self,
        period: int,
        batch_size: int,
        train_dir: Path,
        settings: Mapping[str, Any],
        dataset: Dataset,
        state: TrainState,
        device: str,
    ) -> None:
        self._directory = train_dir
        events = train_dir / layout.EVALUATION_EVENTS
        layout.check_folder(events)
        self._scored = ScoredSet(
            state.model,
            settings,
            dataset,
            events,
            batch_size=min(batch_size, SCORED_BATCH_SIZE),
        )
        self._averages = state.averages
        self._device = device
        self._place: claim.Place | None = None
        self.first_line = f"Scores: every {period:,} steps, {self._scored.subject}"

    def begin(self, step: int) -> None:
        """Forgets the scores of later steps, which are computed again."""
        self._place = claim.Place(self._directory)
        events = self._scored.events
        with _tolerated(), writing(events):
            forget_later(events, events / layout.METRICS, step)

    def score(self, progress: Progress) -> tuple[str, dict[str, float]]:
        """Scores the step reached, notes it and writes it.

        Returns a line for the user, and the metrics by name.
        """
        step = progress.step
        result = self._scored.score(self._averages, self._device)
        line = self._scored.line(step, result, {})
        with _tolerated():
            line = self._record(step, result) or line
        sums = result.sums
        progress.gains = progress.gains.after(step, sums.correct, sums.count)
        return line, result.scalars

    def _record(self, step: int, result: Result) -> str:
        # A directory that has vanished, or is another run's, gets no scores.
        is_lost = self._place and self._place.problem()
        if is_lost or not self._directory.is_dir():
            return ""
        return self._scored.record(step, result)


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    """Turns a failing disk into a warning."""
    try:
        yield
    except DiskError as error:
        loss = "The training continues; its scores are not recorded there."
        say(f"{error.what} {loss}")
