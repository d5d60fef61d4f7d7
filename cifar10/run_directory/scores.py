"""The scores of checkpoints that `eval.py` writes, one line each.

The training reads them to keep the best checkpoints. A line that a killed process left
incomplete, or a disk damaged, costs that line and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cifar10.run_directory import files

# The metric by which one checkpoint is better than another.
_RANKED_BY = "precision @ 1"
_FILE = "metrics.jsonl"


def append(
    directory: Path, step: int, scalars: Mapping[str, float], num_examples: int
) -> None:
    """Appends the scores of one checkpoint to `metrics.jsonl`, as one line of JSON."""
    line = json.dumps({"step": step, **scalars, "num_examples": num_examples}) + "\n"
    with (directory / _FILE).open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read() != b"\n":  # Keeps an incomplete line before from joining.
                line = "\n" + line
        file.write(line.encode())


def read(directory: Path, num_examples: int | None = None) -> dict[int, float]:
    """Returns the checkpoints' precision @ 1 by step, as `comparable` selects them."""
    path = directory / _FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise files.unreadable(path, error) from error
    found = comparable(map(_parse, lines), num_examples)
    return {step: float(entry[_RANKED_BY]) for step, entry in found.items()}


def comparable(
    entries: Iterable[Any], num_examples: int | None = None
) -> dict[int, Any]:
    """Returns the entries by step, ascending, that compare with one another.

    They are those of one number of images, by default the largest: scores of a few
    images do not compare with those of the whole set. Later entries replace earlier
    ones of their step; damaged ones are left out.
    """
    found = [entry for entry in entries if _is_intact(entry)]
    if num_examples is None:
        num_examples = max((int(entry["num_examples"]) for entry in found), default=0)
    chosen = [entry for entry in found if int(entry["num_examples"]) == num_examples]
    by_step = {int(entry["step"]): entry for entry in chosen}
    return dict(sorted(by_step.items()))


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_intact(entry: Any) -> bool:
    try:
        int(entry["step"]), int(entry["num_examples"])
        return 0 <= float(entry[_RANKED_BY]) <= 1
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
