"""The scores of a run's checkpoints, and which checkpoint is the best.

`eval.py` and `--eval_steps` write the scores. The best checkpoint is the one with the
best score on the split `val`, or on the test split if the run has no `val`.
"""

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cifar10.config import layout
from cifar10.config.fields import LOWER_IS_BETTER, PRECISION
from cifar10.config.run_config import RecordedRun
from cifar10.config.schema import SCORES, wrong
from cifar10.errors import UsageError, rounded
from cifar10.run_directory import logs

_COUNT, _SCORE = "num_examples", float | None
_Z = 1.959964  # 95 % of a normal distribution lies within this many deviations.


class Deciding(NamedTuple):
    """The scores that determine the best checkpoint of a run."""

    split: str  # The split: `val` or `test`.
    by: str  # The name of the score.
    images: int  # Number of images scored; 0 without scores.
    values: dict[int, float]  # By step.


def log_of(split: str) -> str:
    """Returns the path of a split's scores in a run's directory."""
    return f"{layout.evaluation_events(split)}/{layout.METRICS}"


def decided_by(run: Path) -> tuple[str, str]:
    """Returns the split and the score that determine the best checkpoint of a run."""
    with contextlib.suppress(UsageError):  # A damaged `config.json` stops no run.
        recorded = RecordedRun.read(run)
        split = "val" if "val" in recorded.facts.data_parts else "test"
        return split, recorded.config.checkpoints.best_by
    return "test", PRECISION


def deciding(run: Path, on: str | None = None, by: str | None = None) -> Deciding:
    """Returns the scores that determine the best checkpoint of a run.

    With `on`, returns the same scores on that split, which may decide nothing; with
    `by`, the scores of that name.
    """
    split, recorded = decided_by(run)
    split, by = on or split, by or recorded
    scored = merged_by_step(logs.read_lines(run / log_of(split))).items()
    # `eval` writes no whole numbers as scores, and null for values that are not finite.
    known = [(at, one[by]) for at, one in scored if isinstance(one.get(by, 0), _SCORE)]
    values = {step: math.nan if one is None else one for step, one in known}
    images = max((one[_COUNT] for _, one in scored), default=0)
    return Deciding(split, by, images, values)


def append(directory: Path, step: int, scores: Mapping[str, Any], count: int) -> None:
    """Appends the scores of a checkpoint to `metrics.jsonl` in `directory`."""
    entry = {"step": step, **scores, _COUNT: count}
    logs.append_line(directory / layout.METRICS, entry)


def ranked(found: Mapping[int, float], by: str = PRECISION) -> list[int]:
    """Sorts steps from the best score to the worst; ties are in order of steps."""
    # Every choice of a best checkpoint uses this function, so all choices agree.
    sign = 1 if by in LOWER_IS_BETTER else -1
    return sorted(found, key=lambda at: (math.isnan(found[at]), sign * found[at], at))


def best(
    run: Path, steps: Collection[int], count: int = 1, more: Mapping[int, float] = {}
) -> list[int]:
    """Ranks the `count` best of `steps`; `more` maps steps to scores not in the log."""
    found = deciding(run)
    ranking = ranked({**more, **found.values}, found.by)
    return [step for step in ranking if step in steps][:count]


def interval(part: float, count: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of `part`, a fraction of `count` images."""
    # Wilson's score interval (https://doi.org/10.1080/01621459.1927.10502953).
    square = _Z**2 / count
    centre = part + square / 2
    half = math.sqrt(square * (part * (1 - part) + square / 4))
    return (centre - half) / (1 + square), (centre + half) / (1 + square)


def shown(by: str, value: float, count: int) -> str:
    """Formats a score with its name; a precision also with its 95 % interval."""
    if by != PRECISION or not count:
        return f"{by} = {rounded(value, 3)}"
    low, high = interval(value, count)
    return f"{by} = {value:.3f} [{low:.3f}, {high:.3f}]"


def merged_by_step(entries: Iterable[Any]) -> dict[int, dict]:
    """Merges the `full_evaluations` of each step; later scores replace earlier ones."""
    by_step: dict[int, dict] = {}
    for entry in full_evaluations(entries):
        by_step.setdefault(entry["step"], {}).update(entry)
    return by_step


def full_evaluations(entries: Iterable[Any]) -> list[dict]:
    """Returns the entries of the evaluations on the most images, ordered by step."""
    # Scores on few images do not compare with scores on the whole set.
    intact = [one for one in entries if not wrong(one, SCORES, needs_all=True)]
    count = max((one[_COUNT] for one in intact), default=0)
    found = [one for one in intact if one[_COUNT] == count]
    return sorted(found, key=operator.itemgetter("step"))
