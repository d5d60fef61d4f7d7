"""Groups runs that differ in their seeds alone, and averages their scores."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cifar10.config.fields import PRECISION, result_determining
from cifar10.config.run_config import RecordedRun
from cifar10.run_directory import logs, scores

_STEPS = 100_000  # Of the integral of Student's density.


class Seeds(NamedTuple):
    """The scores of one configuration, over the seeds that were trained."""

    names: list[str]  # Of the runs.
    split: str  # The split that was scored.
    step: int
    seeds: int
    mean: float  # Of `PRECISION`, as are the next two; None of a single seed.
    deviation: float | None
    interval: tuple[float, float] | None  # Of the mean, with 95 % confidence.

    def __str__(self) -> str:
        if self.interval is None or self.deviation is None:
            return f"{PRECISION} = {self.mean:.4f} on {self.split} (one seed)"
        low, high = self.interval
        return (
            f"{PRECISION} = {self.mean:.4f} on {self.split} at step {self.step:,}, "
            f"mean of {self.seeds} seeds, 95 % interval {low:.4f} to {high:.4f}, "
            f"deviation {self.deviation:.4f}"
        )


def last_scores(run: RecordedRun) -> tuple[str, dict[str, Any]]:
    """Returns the last scores on the test set, or else on the deciding split.

    They are empty before the first evaluation.
    """
    splits = "test", scores.deciding_split(run.directory)
    for split in splits:
        lines = logs.read_lines(run.directory / scores.log_of(split))
        if found := [*scores.comparable(lines).values()]:
            return split, found[-1]
    return splits[-1], {}


def grouped(
    scored: Iterable[tuple[str, RecordedRun, str, Mapping[str, Any]]],
) -> list[Seeds]:
    """Groups runs of the same configuration, scored at the same step.

    Each run is given with its name, and with the split and a line of its scores.
    """
    groups: dict[Any, dict[int, tuple[str, float]]] = defaultdict(dict)
    for name, run, split, line in scored:
        names = sorted({*result_determining(run.config), "data_fingerprint"} - {"seed"})
        alike = [run.values[name] for name in names]
        if line:
            key = split, line["step"], line.get("num_examples"), repr(alike)
            groups[key][run.config.run.seed] = name, line[PRECISION]
    return [
        _average(split, step, *zip(*of_seeds.values(), strict=True))
        for (split, step, *_), of_seeds in groups.items()
    ]


def _average(
    split: str, step: int, names: Sequence[str], values: Sequence[float]
) -> Seeds:
    mean, count = statistics.mean(values), len(values)
    if count == 1:
        return Seeds([*names], split, step, count, mean, None, None)
    deviation = statistics.stdev(values)
    half = _student(count - 1) * deviation / math.sqrt(count)
    interval = max(0.0, mean - half), min(1.0, mean + half)
    return Seeds([*names], split, step, count, mean, deviation, interval)


def _student(freedom: int) -> float:
    """Returns the number of deviations that hold 95 % of Student's distribution.

    With t = sqrt(freedom) * tan(angle), its density is cos(angle) ** (freedom - 1).
    """
    width = math.pi / 2 / _STEPS
    heights = [math.cos(width * (n + 0.5)) ** (freedom - 1) for n in range(_STEPS)]
    most = 0.95 * math.fsum(heights)
    inside = sum(one < most for one in itertools.accumulate(heights))
    return math.sqrt(freedom) * math.tan(width * (inside + 0.5))
