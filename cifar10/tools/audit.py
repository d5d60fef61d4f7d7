"""`python -m cifar10 audit`: checks a run, by its chain and by recomputing parts."""

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

HELP = "check that a run is what it claims, by recomputing parts of it"
DESCRIPTION = """Checks that a run is what it claims, by recomputing parts of it.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

First the chain: each checkpoint's manifest holds the digest of its files, of the
log, of all manifests before, and what the run was computed from. Then segments,
each from a checkpoint to the next one that is kept, drawn by --seed, are
recomputed, scored, and compared. Choose the seed after the run has ended.
Exit code 1: something is not what it claims.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReplayOptions):
    """What to recompute.

    Attributes:
        segments: number of segments to recompute
        seed: seed by which the segments are drawn
        json: print JSON
    """

    segments: Count = 5
    seed: Annotated[int, Range(0, 2**63)] = 0
    json: bool = False


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    run, options = parse(parser, words, Options)
    breaks = [*dict.fromkeys(chain.find_breaks(run, run_config.read_run_config(run)))]
    chained = [one for one in chain.read(run).values() if chain.ENTRY in one]
    found = {"chain": len(chained), "breaks": breaks}
    older = (at for at, one in chain.manifests(run).items() if chain.ENTRY not in one)
    found["unchained"] = max(older, default=0)  # The last step of an older version.
    found |= {"segments": [], "of": 0, "differences": [], "verified": 0.0}
    try:
        found |= recompute(open_run(run, options), options.segments, options.seed)
    except UsageError as error:  # As of a run whose `config.json` was edited.
        if not breaks:
            raise
        breaks.append(f"no step can be recomputed: {error}")
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 1 if breaks or found["differences"] else 0


def recompute(replay: "Replay", count: int, seed: int) -> dict[str, Any]:
    """Recomputes some of the segments of a run.

    Returns the `segments` that were drawn, `of` how many, and as `differences` the
    first steps in them that differ; the fraction of the run's steps that is `verified`,
    within the `bound`; `passes`, the probability that a run with one segment tampered
    with passes these draws.
    """
    # The initial values follow from the seed.
    begun = [] if replay.recorded.get("initial_weights") else [0]
    segments = [*itertools.pairwise(sorted({*begun, *replay.saved}))]
    if not segments:
        raise UsageError(
            f"{replay.run} has no two checkpoints to recompute a segment between."
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
        chained += f"; none up to step {last:,}, which an earlier version wrote"
    segments = [f"{first:,} to {last:,}" for first, last in found["segments"]]
    differing = "  DIFFERS: step {step:,}, {place}: {name}".format
    lines = [
        f"Chain:    {chained}",
        *(f"  BROKEN: {one}" for one in found["breaks"]),
        f"Segments: {len(segments)} of {found['of']}: {', '.join(segments)}",
        *(differing(**one) for one in found["differences"]),
    ]
    if found["breaks"] or found["differences"]:
        return "\n".join([*lines, "The run is not what it says."])
    bits = f"within {found['bound']:g}" if found["bound"] else "to the last bit"
    lines.append(f"Verified: {found['verified']:.0%} of the steps, {bits}")
    chance = f"{found['passes']:.0%}"
    lines.append(f"A run with one segment tampered with passes such draws in {chance}.")
    return "\n".join(lines)
