"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import itertools
import json
import random
from collections.abc import Sequence

from cifar10.errors import UsageError
from cifar10.run_directory import chain
from cifar10.tools.replay import open_run

HELP = "find out whether a run was altered, by checksums and by recomputing steps"
DESCRIPTION = """Finds out whether a run was altered, by checksums and recomputation.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

A checkpoint's manifest holds the settings of the run and SHA-256 checksums of
the checkpoint, the log and the manifest before it. First, these are checked.
Then segments, from a checkpoint to the next, are drawn at random, recomputed
and compared with the run. Choose the --seed of the draw after the run has
ended. The report names the fraction of the steps that is verified, and the
probability that the draw misses a single altered segment. Exit code 1:
something differs.
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
    differences, verified = [], 0
    for first, last in drawn:
        steps = replay.steps(first + 1, last)
        worst = max(one for batches in steps for one in replay.compare(batches))
        if worst[0] > replay.bound:
            differences.append(worst)
        else:
            verified += last - first
    report = {
        "checkpoints": len(replay.saved),
        "linked": linked,  # Checkpoints of an earlier version have no link.
        "breaks": breaks,
        "segments": len(segments),
        "recomputed": drawn,
        "differences": differences,
        "bound": replay.bound,
        "verified": verified / segments[-1][1],
        "missed": 1 - count / len(segments),
    }
    if given["json"]:
        print(json.dumps(report, indent=2))
    else:
        lines = [f"{name + ':':13}{value}" for name, value in report.items()]
        print("\n".join(lines))
    return 1 if breaks or differences else 0
