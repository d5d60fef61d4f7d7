"""The scores of checkpoints that `eval.py` writes, one line each.

The training reads them to keep the best checkpoints. A line that a killed process left
incomplete, or a disk damaged, costs that line and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

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


def read(directory: Path) -> dict[int, float]:
    """Returns the checkpoints' precision @ 1 by step; later lines replace earlier ones.

    Only lines with the largest number of images count, since scores of a few images
    do not compare with those of the whole set.
    """
    path = directory / _FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise files.unreadable(path, error) from error
    found = [entry for line in lines if (entry := _entry(line)) is not None]
    most = max((num_examples for _, _, num_examples in found), default=0)
    return {step: score for step, score, count in found if count == most}


def _entry(line: bytes) -> tuple[int, float, int] | None:
    """Returns step, score and images of a line; None if it is damaged."""
    try:
        entry = json.loads(line)
        step, score = int(entry["step"]), float(entry[_RANKED_BY])
        count = int(entry["num_examples"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return (step, score, count) if 0 <= score <= 1 else None
