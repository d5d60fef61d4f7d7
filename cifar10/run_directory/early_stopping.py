"""Early stopping: the best score of a run, and when to end without a better one.

The manifest of a checkpoint holds the best score of the training's own evaluations, and
the number of evaluations since. So a run that is resumed or rolled back decides as if
it had not been interrupted, whatever has become of the logs, and whoever follows it
knows from its newest checkpoint whether it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.config.fields import PRECISION
from cifar10.errors import DiskError
from cifar10.process import invocation
from cifar10.run_directory import checkpoints, scores

_ENTRY = "validation"  # Of a manifest.


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The best evaluation so far, and how many have come since without a gain."""

    images: int = 0  # Without an evaluation there are none.
    step: int = 0
    without_gain: int = 0
    score: float = 0.0
    best_by: str = PRECISION  # The name of that score.

    @classmethod
    def from_manifest(
        cls, manifest: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> EarlyStopping:
        """Returns what a checkpoint's manifest records, if it is of the same score.

        The `settings` are the content of the run's `config.json`.
        """
        found, by = manifest.get(_ENTRY, {}), settings.get("best_by", PRECISION)
        return cls(**found) if found.get("best_by") == by else cls(best_by=by)

    def to_manifest(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint's manifest; none before an evaluation."""
        return {_ENTRY: dataclasses.asdict(self)} if self.images else {}

    @property
    def scores(self) -> dict[int, float]:
        """The best score by its step; empty before an evaluation."""
        return {self.step: self.score} if self.images else {}

    def updated(self, step: int, score: float, images: int) -> EarlyStopping:
        """Returns the record after one more evaluation; a gain is a better score."""
        if scores.ranked({**self.scores, step: score}, self.best_by)[0] == step:
            return EarlyStopping(images, step, 0, score, self.best_by)
        return dataclasses.replace(self, without_gain=self.without_gain + 1)

    def should_stop(self, evaluations: int | None) -> bool:
        """Returns whether there was no gain in that many evaluations in a row."""
        return evaluations is not None and self.without_gain >= evaluations


def why_ended(settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
    """Returns what ended a run at a checkpoint; None if it goes on from there.

    Args:
        settings: The content of its `config.json`.
        manifest: The manifest of the checkpoint.

    Returns:
        `max_steps`, `max_epochs` or `max_hours`; or `no_gain` by `stop_after_no_gain`.
    """
    if manifest["step"] >= settings["max_steps"]:
        return "max_epochs" if settings.get("max_epochs") else "max_steps"
    if manifest.get("hours", 0.0) >= (settings.get("max_hours") or math.inf):
        return "max_hours"
    record = EarlyStopping.from_manifest(manifest, settings)
    return "no_gain" if record.should_stop(settings.get("stop_after_no_gain")) else None


def how_to_score(run: Path, config: Config, step: int, record: EarlyStopping) -> str:
    """Returns how to score a run at its best step, or else at its last one."""
    best = scores.ranked(_all_scores(run, record), record.best_by)[:1]
    kept = {*best} & {*checkpoints.steps(run / layout.CHECKPOINTS)} - {step}
    named = config.network.model, config.dataset.data
    return invocation.to_score(str(run), *named, next(iter(kept), None))


def outcome(config: Config, step: int, record: EarlyStopping) -> str:
    """Returns the best score of a run, how to export it, and whether it ended the run.

    It is empty if there are no scores. Scores by `eval.py` count too.
    """
    run = layout.locate_run(config.run.train_dir)
    found = _all_scores(run, record)
    if not found:
        return ""
    best = scores.ranked(found, record.best_by)[0]
    score = scores.shown(record.best_by, found[best], record.images)
    lines = [f"Best:   {score} at step {best} on {scores.deciding_part(run)}"]
    if best not in checkpoints.steps(run / layout.CHECKPOINTS):
        lines[0] += "; not kept (--keep_best)"
    elif invocation.takes_flags():
        export = f"{invocation.command('export')} --output best_model --step {best}"
        lines.append(f"  export it:     {export} --train_dir {shlex.quote(str(run))}")
    patience = config.checkpoints.stop_after_no_gain
    if step < config.run.max_steps and record.should_stop(patience):
        lines.insert(0, f"Ended at step {step} by --stop_after_no_gain {patience}.")
        longer = 2 * record.without_gain
        command = invocation.to_resume(run, config.values, stop_after_no_gain=longer)
        if command:
            lines.append(f"  train longer:  {command}")
    return "\n".join(lines)


def _all_scores(run: Path, record: EarlyStopping) -> dict[int, float]:
    """Returns all scores of a run that are known, by step."""
    with contextlib.suppress(DiskError):
        return {**record.scores, **scores.deciding(run)}
    return record.scores
