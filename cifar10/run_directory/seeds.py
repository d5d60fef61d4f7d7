"""Groups runs that differ only in their seeds, and averages their scores."""

import itertools
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from cifar10.config.fields import PRECISION, result_determining
from cifar10.config.run_config import RecordedRun
from cifar10.run_directory import logs, scores

_STEPS = 100_000  # For the integral of Student's density.


class Seeds(NamedTuple):
    """The scores of one configuration, over the seeds that were trained."""

    names: list[str]  # The runs' names.
    left_out: list[str]  # Names of runs whose seed is taken by another.
    split: str  # The split that was scored.
    step: int | None  # None if each run ended at a step of its own.
    seeds: int
    mean: float  # `PRECISION`'s, as the next two; None for a single seed.
    deviation: float | None
    interval: tuple[float, float] | None  # The mean's, with 95 % confidence.

    def __str__(self) -> str:
        if self.interval is None or self.deviation is None:
            return f"{PRECISION} = {self.mean:.4f} on {self.split} (one seed)"
        low, high = self.interval
        at = "its last step" if self.step is None else f"step {self.step:,}"
        return (
            f"{PRECISION} = {self.mean:.4f} on {self.split} at {at}, "
            f"mean of {self.seeds} seeds, 95 % interval {low:.4f} to {high:.4f}, "
            f"deviation {self.deviation:.4f}"
        )


def last_scores(run: RecordedRun) -> tuple[str, dict[str, Any]]:
    """Returns the last scores, if any, on the test set or else the deciding split."""
    splits = "test", scores.decided_by(run.directory)[0]
    for split in splits:
        lines = logs.read_lines(run.directory / scores.log_of(split))
        if found := [*scores.merged_by_step(lines).values()]:
            return split, found[-1]
    return splits[-1], {}


def final_scores(run: RecordedRun) -> tuple[str, dict[str, Any]]:
    """Returns an ended run's `last_scores`, without a step that differs by seed."""
    split, line = last_scores(run)
    if line and (run.config.run.max_hours or run.config.checkpoints.stop_after_no_gain):
        line = {**line, "step": None}
    return split, line


def grouped(scored: Iterable[tuple[str, RecordedRun, str, dict]]) -> list[Seeds]:
    """Groups runs of the same configuration and model, scored at the same step.

    Each run is given with its name, and with the split and a line of its scores. Of
    runs of the same seed, the one whose folder holds most of the others counts. A run
    that `whatif` made does not count: it has the settings and the seed of another.
    """
    groups: dict[Any, list[tuple[str, int, float]]] = defaultdict(list)
    for name, run, split, line in scored:
        names = {*result_determining(run.config)} - {"seed"}
        # Towers' batch sizes must agree, too: batch norm sees one batch at a time.
        names |= {"batch_size", "data_fingerprint", "parameters"}
        alike = [run.values[name] for name in sorted(names)]
        # So must what a user's model computes, to a thousandth.
        logits = run.facts.model_logits
        largest = max(map(abs, logits), default=0.0) or 1.0
        alike += [round(one / largest, 3) for one in logits]
        if line and not run.facts.what_if:
            key = split, line["step"], line.get("num_examples"), repr(alike)
            groups[key].append((name, run.config.run.seed, line[PRECISION]))
    return [_average(split, step, of) for (split, step, *_), of in groups.items()]


def _average(split: str, step: int | None, runs: list[tuple[str, int, float]]) -> Seeds:
    folders = {name: os.path.split(name)[0] for name, *_ in runs}
    count = Counter(folders.values())
    # The others' last: of two, `seed-0` and not `seed-0.1`, which --fresh moved away.
    ranked = sorted(runs, key=lambda run: (-count[folders[run[0]]], run[0]))[::-1]
    chosen = {seed: (name, value) for name, seed, value in ranked}
    names = [name for name, *_ in runs if name in dict(chosen.values())]
    left_out = [name for name, *_ in runs if name not in names]
    values = [value for _, value in chosen.values()]
    mean = statistics.mean(values)
    about = names, left_out, split, step, len(values), mean
    if len(values) == 1:
        return Seeds(*about, None, None)
    deviation = statistics.stdev(values)
    half = _student(len(values) - 1) * deviation / math.sqrt(len(values))
    return Seeds(*about, deviation, (max(0.0, mean - half), min(1.0, mean + half)))


def _student(freedom: int) -> float:
    """Returns the number of deviations that hold 95 % of Student's distribution."""
    # With t = sqrt(freedom) * tan(angle), its density is cos(angle) ** (freedom - 1).
    width = math.pi / 2 / _STEPS
    heights = [math.cos(width * (n + 0.5)) ** (freedom - 1) for n in range(_STEPS)]
    most = 0.95 * math.fsum(heights)
    inside = sum(one < most for one in itertools.accumulate(heights))
    return math.sqrt(freedom) * math.tan(width * (inside + 0.5))
