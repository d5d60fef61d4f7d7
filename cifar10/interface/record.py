"""The record of a run whose training has ended."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.run_directory import logs, scores

# The entries of a line of `metrics.jsonl` that are no metrics.
_FACTS = ("step", "time", "seconds")


@dataclasses.dataclass(frozen=True)
class Record:
    """A run whose training has ended.

    Attributes:
        train_dir: Its directory.
        step: The step that it reached.
        ended: Why: `max_steps`, or `no_gain` by `stop_after_no_gain`.
        seconds: Wall time of this call of `train`; earlier sessions do not count.
        history: Metrics by step, every `log_frequency` steps, of all sessions.
        scores: Precision @ 1 on the test set by step, of the run's own evaluations
            (`eval_steps`) and those of `eval.py`.
        config: The configuration of the training.
    """

    train_dir: Path
    step: int
    ended: str
    seconds: float
    history: Mapping[int, Mapping[str, float]] = dataclasses.field(repr=False)
    scores: Mapping[int, float] = dataclasses.field(repr=False)
    config: Config = dataclasses.field(repr=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last logged step."""
        return self.history[max(self.history)] if self.history else {}

    @property
    def best(self) -> tuple[int, float] | None:
        """The step of the highest score and that score; None without one."""
        steps = scores.ranked(self.scores)
        return (steps[0], self.scores[steps[0]]) if steps else None


def read(train_dir: Path, step: int, seconds: float, config: Config) -> Record:
    """Reads the record of a run from its directory."""
    lines = logs.read_lines(train_dir / layout.METRICS)
    return Record(
        train_dir=train_dir,
        step=step,
        ended="max_steps" if step >= config.run.max_steps else "no_gain",
        seconds=seconds,
        history={
            line["step"]: {
                name: math.nan if value is None else value
                for name, value in line.items()
                if name not in _FACTS
            }
            for line in lines
            # A line that a kill has torn has no step.
            if isinstance(line, dict) and isinstance(line.get("step"), int)
        },
        scores=scores.read(train_dir / layout.EVALUATION_EVENTS),
        config=config,
    )
