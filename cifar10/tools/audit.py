"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, starting
from cifar10.tools.replay import compare, open_run

HELP = "find out whether a run was altered, by checksums and by recomputing steps"
DESCRIPTION = """Finds out whether a run was altered, by checksums and recomputation.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

Checks the manifests' checksums, then recomputes segments between checkpoints,
drawn by a --seed to be chosen after the run. Exit code 1: something differs.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.add_argument("--segments", type=int, default=5, help="number to recompute")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replay, given = open_run(parser, words)
    linked, breaks = _check_chain(replay.run, replay.recorded)
    segments = [*itertools.pairwise(sorted({replay.begun, *replay.saved}))]
    if not segments:
        raise UsageError(f"{replay.run} has too few checkpoints. Save at least two.")
    count = 0 if breaks else min(given["segments"], len(segments))
    drawn = sorted(random.Random(given["seed"]).sample(segments, count))  # noqa: S311
    worst = {(first, last): compare(replay, first + 1, last) for first, last in drawn}
    verified = sum(last - first for (first, last), one in worst.items() if not one[0])
    report = {
        "checkpoints": len(replay.saved),
        "linked": linked,  # Checkpoints of an earlier version have no link.
        "breaks": breaks,
        "segments": len(segments),
        "recomputed": drawn,
        "differs": bool(breaks) or any(one[0] for one in worst.values()),
        "differences": [one[1:] for one in worst.values() if one[0]],
        "largest": max(worst.values())[1:] if worst else None,
        "verified": verified / segments[-1][1],
        "missed": 1 - count / len(segments),
    }
    lines = "\n".join(f"{name + ':':13}{value}" for name, value in report.items())
    print(json.dumps(report, indent=2) if given["json"] else lines)
    return 1 if report["differs"] else 0


def _check_chain(run: Path, recorded: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Returns the number of linked checkpoints, and a message on each contradiction."""
    directory, linked, breaks = run / layout.CHECKPOINTS, 0, []
    saved = checkpoints.steps(directory)
    for step in saved:
        where = f"checkpoint of step {step}"
        try:
            link = checkpoints.verify(directory, step).manifest.get(checkpoints.LINK)
        except checkpoints.DamagedError as error:
            breaks.append(f"{where}: {error}")
            continue
        if not isinstance(link, dict) or not isinstance(link.get("settings"), dict):
            continue  # An earlier version wrote the manifest.
        linked += 1
        now = checkpoints.make_link(directory, step, {})
        is_deleted = link.get("step") not in (None, *saved)  # The one before.
        breaks += [
            f"{where}: the {name} before it has changed"
            for name in (["log"] if is_deleted else ["log", "step", "manifest"])
            if link.get(name) != now.get(name)
        ]
        changed = starting.find_differences(run, recorded, link["settings"])
        breaks += [
            f"{layout.CONFIG}: {name} is {now!r}, but was {then!r} at step {step}"
            for name, (now, then) in changed.items()
            if name != "versions"
        ]
    return linked, breaks
