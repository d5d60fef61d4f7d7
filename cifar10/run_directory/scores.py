"""The scores of checkpoints, and which of them is the best.

`eval.py` and `--eval_steps` write them. Those on the part `val` decide, or those on the
test part if the run has no `val`.
"""

import contextlib
import operator
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout, run_config
from cifar10.errors import UsageError
from cifar10.run_directory import logs

# The metric by which one checkpoint is better than another.
_RANKED_BY = "precision @ 1"
_COUNT = "num_examples"


def deciding_part(run: Path) -> str:
    """Returns the part of a run's data whose scores decide: `val` or `test`."""
    kept: dict[str, Any] = {}
    with contextlib.suppress(UsageError):  # The run goes on if its file is damaged.
        kept = run_config.recorded_division(run, fresh=False)
    return "val" if "val" in kept.get("data_parts", ()) else "test"


def deciding_folder(run: Path) -> Path:
    """Returns the folder of the scores of a run that decide."""
    return run / layout.evaluation_events(deciding_part(run))


def append(
    directory: Path,
    step: int,
    scalars: Mapping[str, float],
    num_examples: int,
    part: str = "test",
) -> None:
    """Appends the scores of one checkpoint to `metrics.jsonl` in a folder."""
    entry = {"step": step, **scalars, _COUNT: num_examples, "part": part}
    logs.append_line(directory / layout.METRICS, entry)


def read(directory: Path, num_examples: int | None = None) -> dict[int, float]:
    """Returns the checkpoints' precision @ 1 by step, as `comparable` selects them."""
    found = comparable(logs.read_lines(directory / layout.METRICS), num_examples)
    return {step: entry[_RANKED_BY] for step, entry in found.items()}


def ranked(found: Mapping[int, float]) -> list[int]:
    """Returns the steps of scores, the best first; of equal scores the earlier step.

    Whatever names, keeps or waits for a best score asks here, so a run has one best.
    """
    return sorted(found, key=lambda step: (-found[step], step))


def best(directory: Path, steps: Collection[int], count: int = 1) -> list[int]:
    """Returns those of `steps` with the best scores in a folder, the best first."""
    found = read(directory)
    return ranked({step: found[step] for step in steps if step in found})[:count]


def comparable(entries: Iterable[Any], num_examples: int | None = None) -> dict:
    """Returns by step the entries scored on as many images, by default on most.

    Scores on a few images are not comparable with scores on the whole set. Of several
    entries of a step the last one counts.
    """
    found = sorted(filter(_is_intact, entries), key=operator.itemgetter("step"))
    count = num_examples or max((entry[_COUNT] for entry in found), default=0)
    return {entry["step"]: entry for entry in found if entry[_COUNT] == count}


def _is_intact(entry: Any) -> bool:
    try:
        are_integers = all(isinstance(entry[name], int) for name in ("step", _COUNT))
        return are_integers and 0 <= entry[_RANKED_BY] <= 1
    except (KeyError, TypeError):
        return False
