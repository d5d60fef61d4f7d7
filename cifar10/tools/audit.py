"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import itertools
import json
import random
from collections.abc import Sequence

from cifar10.errors import UsageError
from cifar10.run_directory import chain
from cifar10.tools.replay import compare, open_run

HELP = "find out whether a run was altered, by checksums and by recomputing steps"
DESCRIPTION = """Finds out whether a run was altered, by checksums and recomputation.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

First, the checksums in the checkpoints' manifests are checked. Then segments,
each from a checkpoint to the next, are drawn at random, recomputed and
compared with the run. Choose the --seed of the draw after the run has ended.
docs/auditing.md explains the report. Exit code 1: something differs.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.add_argument("--segments", type=int, default=5, help="number to recompute")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replay, given = open_run(parser, words)
    linked, breaks = chain.check(replay.run, replay.recorded)
    segments = [*itertools.pairwise(sorted({replay.begun, *replay.saved}))]
    if not segments:
        raise UsageError(f"{replay.run} has too few checkpoints. Save at least two.")
    count = 0 if breaks else min(max(given["segments"], 0), len(segments))
    drawn = sorted(random.Random(given["seed"]).sample(segments, count))  # noqa: S311
    worst = [compare(replay, first + 1, last) for first, last in drawn]
    pairs = zip(drawn, worst, strict=True)
    verified = sum(last - first for (first, last), one in pairs if not one.exceeds)
    report = {
        "checkpoints": len(replay.saved),
        "linked": linked,  # Checkpoints of an earlier version have no link.
        "breaks": breaks,
        "segments": len(segments),
        "recomputed": drawn,
        "differences": [one[1:] for one in worst if one.exceeds],
        "largest": max(worst)[1:] if worst else None,
        "verified": verified / segments[-1][1],
        "missed": 1 - count / len(segments),
    }
    if given["json"]:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(f"{name + ':':13}{value}" for name, value in report.items()))
    return 1 if breaks or report["differences"] else 0
