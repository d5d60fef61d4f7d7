"""Early stopping: tracks the best score of a run and decides when the run ends.

The manifest of a checkpoint holds the best score of the run's own evaluations, and the
number of evaluations since that best one. A run that is resumed or rolled back thus
ends where an uninterrupted run would, even if its logs are lost. A program that follows
the run can tell from the newest manifest whether the run has ended.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.config.fields import PRECISION, BaseConfig
from cifar10.config.run_options import BEST
from cifar10.errors import DiskError
from cifar10.process import invocation
from cifar10.run_directory import checkpoints, scores

_ENTRY = "validation"  # The key of this record in a manifest.


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The best evaluation so far, and the number of evaluations since then."""

    images: int = 0  # Number scored; 0 before the first evaluation.
    step: int = 0
    without_gain: int = 0
    score: float = 0.0
    best_by: str = PRECISION  # The name of the score.

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], best_by: str) -> Self:
        """Returns a manifest's record, or an empty one if `best_by` has changed."""
        found = manifest.get(_ENTRY, {})
        if found and "best_by" not in found:  # Version 1.0.0 wrote it.
            share = found["correct"] / found["images"]
            found = {**found, "score": share, "best_by": PRECISION}
        if found.get("best_by") != best_by:
            return cls(best_by=best_by)
        return cls(**{one.name: found[one.name] for one in dataclasses.fields(cls)})

    def to_manifest(self) -> dict[str, Any]:
        """Returns the entry for a manifest; empty before the first evaluation."""
        return {_ENTRY: dataclasses.asdict(self)} if self.images else {}

    @property
    def scores(self) -> dict[int, float]:
        """Maps the best step to its score; empty before the first evaluation."""
        return {self.step: self.score} if self.images else {}

    def updated(self, step: int, score: float, images: int) -> "EarlyStopping":
        """Returns the record after one more evaluation."""
        if scores.ranked({**self.scores, step: score}, self.best_by)[0] == step:
            return EarlyStopping(images, step, 0, score, self.best_by)
        return dataclasses.replace(self, without_gain=self.without_gain + 1)

    def should_stop(self, evaluations: int | None) -> bool:
        """Returns whether the score has not improved for `evaluations` evaluations."""
        return evaluations is not None and self.without_gain >= evaluations


def why_ended(config: BaseConfig, manifest: Mapping[str, Any]) -> str | None:
    """Returns which limit ended a run at a checkpoint; None if the run continues.

    The limit is `max_steps`, `max_epochs`, `max_hours`, or `no_gain` (early stopping).
    """
    limits, keep = config.run, config.checkpoints
    if manifest["step"] >= limits.max_steps:
        return "max_epochs" if limits.max_epochs else "max_steps"
    if limits.max_hours and manifest.get("hours", 0.0) >= limits.max_hours:
        return "max_hours"
    record = EarlyStopping.from_manifest(manifest, keep.best_by)
    return "no_gain" if record.should_stop(keep.stop_after_no_gain) else None


def ranked_scores(run: Path, record: EarlyStopping) -> dict[int, float]:
    """Maps steps to their deciding scores, logged or recorded, best first."""
    found = record.scores
    with contextlib.suppress(DiskError):
        found = {**found, **scores.deciding(run, by=record.best_by).values}
    return {step: found[step] for step in scores.ranked(found, record.best_by)}


def outcome(config: Config, step: int, record: EarlyStopping) -> str:
    """Describes the best step, its score and its export; empty without scores."""
    run = layout.absolute_path(config.run.train_dir)
    if not (found := ranked_scores(run, record)):
        return ""
    lines, patience = [], config.checkpoints.stop_after_no_gain
    if step < config.run.max_steps and record.should_stop(patience):
        lines.append(f"Ended at step {step} by --stop_after_no_gain {patience}.")
    best = next(iter(found))
    score = scores.shown(record.best_by, found[best], record.images)
    split = scores.decided_by(run)[0]
    lines.append(f"Best:   {score} at step {best} on {split}")
    if split == "test" and len(found) > 1:
        lines[-1] += ", which also chose this step, so slightly optimistic"
    if step not in found:
        lines[-1] += f"; step {step}, the last, was not a candidate (--eval_steps)"
    if best not in (kept := checkpoints.steps(run / layout.CHECKPOINTS)):
        lines[-1] += "; its checkpoint was not kept (--keep_best)"
    else:
        which: int | str = best  # If a score could not be logged, or cannot be read.
        with contextlib.suppress(DiskError):
            which = BEST if scores.best(run, kept) == [best] else best
            _, by, images, on_test = scores.deciding(run, "test", record.best_by)
            if split == "val" and best in on_test:
                shown = scores.shown(by, on_test[best], images)
                lines.append(f"  on test:       {shown}")
        export = f"{invocation.command('export')} --output best_model --step {which}"
        lines.append(f"  export it:     {export} --train_dir {shlex.quote(str(run))}")
    return "\n".join(lines)
