"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cifar10.config import run_config
from cifar10.config.options import Count, Range
from cifar10.errors import UsageError, counted
from cifar10.run_directory import chain
from cifar10.tools.replay import ReplayOptions, open_run, parse

if TYPE_CHECKING:
    from cifar10.training.replay import Replay

HELP = "find out whether a run was altered, by checksums and by recomputing steps"
DESCRIPTION = """Finds out whether a run was altered, by checksums and recomputation.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

A checkpoint's manifest holds the settings of the run and SHA-256 checksums of
the checkpoint, the log and all earlier manifests. First, all manifests are
checked. Then segments are drawn at random, recomputed, scored and compared with
the run. A segment begins at one saved checkpoint and ends at the next. Choose
the --seed of the draw after the run has ended. Exit code 1: something differs.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReplayOptions):
    """What to recompute in an audit.

    Attributes:
        segments: number of segments to recompute
        seed: seed of the random draw of segments
        json: print the result as JSON
    """

    segments: Count = 5
    seed: Annotated[int, Range(0, 2**63)] = 0
    json: bool = False


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    run, options = parse(parser, words, Options)
    breaks = [*dict.fromkeys(chain.find_breaks(run, run_config.read_run_config(run)))]
    chained = [one for one in chain.read(run).values() if chain.ENTRY in one]
    found = {"chain": len(chained), "breaks": breaks}
    older = (at for at, one in chain.manifests(run).items() if chain.ENTRY not in one)
    found["unchained"] = max(older, default=0)  # Last step without a chain entry.
    found |= {"segments": [], "of": 0, "differences": [], "verified": 0.0}
    try:
        found |= recompute(open_run(run, options), options.segments, options.seed)
    except UsageError as error:  # For example, because `config.json` was edited.
        if not breaks:
            raise
        breaks.append(f"no step can be recomputed: {error}")
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 1 if breaks or found["differences"] else 0


def recompute(replay: "Replay", count: int, seed: int) -> dict[str, Any]:
    """Recomputes `count` segments of a run, drawn at random with `seed`.

    Returns:
        `segments`: first and last step of each drawn segment.
        `of`: number of segments of the run.
        `differences`: the first difference in each drawn segment, if any.
        `bound`: the largest difference that rounding explains.
        `verified`: fraction of the run's steps that were recomputed; 0 if any differs.
        `passes`: probability that, if one segment was altered, the draw misses it.
    """
    # The initial values follow from the run's seed, so step 0 needs no checkpoint.
    begun = [] if replay.recorded.get("initial_weights") else [0]
    segments = [*itertools.pairwise(sorted({*begun, *replay.saved}))]
    if not segments:
        raise UsageError(
            f"{replay.run} has too few checkpoints for an audit. Save at least two."
        )
    drawn = random.Random(seed).sample(segments, min(count, len(segments)))  # noqa: S311
    differences = []
    for first, last in sorted(drawn):
        compared = replay.compare(first + 1, last)
        differences += [one._asdict() for one in compared if one.largest > one.bound]
    steps = sum(last - first for first, last in drawn)
    return {
        "segments": sorted(drawn),
        "of": len(segments),
        "differences": differences,
        "bound": replay.bound,
        "verified": 0.0
        if differences
        else steps / max([*replay.saved, *replay.logged]),
        "passes": 1 - len(drawn) / len(segments),
    }


def _text(found: dict[str, Any]) -> str:
    chained = counted(found["chain"], "checkpoint")
    if last := found["unchained"]:
        chained += f"; earlier ones, up to step {last:,}, have no chain"
    segments = [f"{first:,} to {last:,}" for first, last in found["segments"]]
    differing = "  DIFFERS: step {step:,}, {place}: {name}".format
    lines = [
        f"Chain:    {chained}",
        *(f"  BROKEN: {one}" for one in found["breaks"]),
        f"Segments: {len(segments)} of {found['of']}: {', '.join(segments)}",
        *(differing(**one) for one in found["differences"]),
    ]
    if found["breaks"] or found["differences"]:
        return "\n".join([*lines, "The run differs from its records."])
    bits = f"within {found['bound']:g}" if found["bound"] else "to the last bit"
    lines.append(f"Verified: {found['verified']:.0%} of the steps, {bits}")
    chance = f"{found['passes']:.0%}"
    lines.append(f"Such a draw misses a single altered segment in {chance} of cases.")
    return "\n".join(lines)
