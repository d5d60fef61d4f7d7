"""`python -m cifar10 audit`: checks a run, by its chain and by recomputing parts."""

import argparse
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cifar10.config import flags, layout
from cifar10.config.options import Count, Range
from cifar10.errors import UsageError, say
from cifar10.run_directory import chain, checkpoints, logs, scores
from cifar10.tools.replay import ReplayOptions, as_json, start_replay

if TYPE_CHECKING:
    from cifar10.training.replay import Replay

HELP = "check that a run is what it says, by recomputing parts of it"
DESCRIPTION = """Checks that a run is what it says, by recomputing parts of it.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

First the chain: each checkpoint's manifest holds the digest of the one before,
of its files, of the log, and of what the run was computed from. Then segments,
each from a checkpoint to the next one that is kept, drawn by --seed, are
recomputed, compared with log and checkpoint, and scored. Choose the seed after
the run has ended. Exit code 1: something is not what it says.
"""
_SCORES = ("precision @ 1", "cross_entropy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReplayOptions):
    """What to recompute.

    Attributes:
        segments: number of segments to recompute
        seed: seed by which they are drawn
    """

    segments: Count = 5
    seed: Annotated[int, Range(0, 2**63)] = 0


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    flags.add_flags(parser, Options)
    given = flags.parse(parser, words)
    run = layout.locate_run(given.pop("run"))
    options = Options(**given)
    replay = start_replay(run, options)
    found = audit_run(run, replay, options.segments, options.seed)
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 1 if found["breaks"] or found["differences"] else 0


def audit_run(run: Path, replay: "Replay", count: int, seed: int) -> dict[str, Any]:
    """Checks the chain of a run, and recomputes some of its segments.

    Returns what contradicts the chain as `breaks`, and the recomputed steps and scores
    that differ as `differences`; the `segments` that were drawn; the part of the run's
    steps that is `verified`; `passes`, the chance with which these draws miss a run of
    which one segment was tampered with.
    """
    segments = find_segments(run, has_seed=not replay.recorded.get("initial_weights"))
    if not segments:
        raise UsageError(
            f"{run} has no two checkpoints to recompute a segment between."
        )
    drawn = random.Random(seed).sample(segments, min(count, len(segments)))  # noqa: S311
    differences = []
    for first, last in sorted(drawn):
        say(f"Recomputing steps {first + 1:,} to {last:,} ...")
        differences += check_segment(run, replay, first, last)
    steps = sum(last - first for first, last in drawn)
    return {
        "chain": len(chain.read(run)),
        "breaks": [*chain.find_breaks(run, replay.training.origin)],
        "segments": sorted(drawn),
        "of": len(segments),
        "differences": differences,
        "bound": replay.bound,
        "verified": 0.0 if differences else steps / segments[-1][1],
        "passes": chance_to_pass(len(segments), len(drawn), 1),
    }


def find_segments(run: Path, *, has_seed: bool) -> list[tuple[int, int]]:
    """Returns the steps between which a run can be recomputed.

    A run `has_seed` if its initial values follow from its seed.
    """
    steps = checkpoints.steps(run / layout.CHECKPOINTS)
    ends = sorted({*steps, *([0] if has_seed else [])})
    return [*itertools.pairwise(ends)]


def check_segment(
    run: Path, replay: "Replay", first: int, last: int
) -> list[dict[str, Any]]:
    """Recomputes a segment; returns what differs, at most one step and the scores."""
    replay.go_before(first + 1)
    if replay.step != first:  # Its checkpoint is damaged, which the chain shows.
        say(f"It begins at step {replay.step:,}.")
    found = next(
        (one for one in replay.compare(first + 1, last) if one.largest > replay.bound),
        None,
    )
    differences = [as_json(found)] if found else []
    recorded = scores.comparable(
        logs.read_lines(run / layout.EVALUATION_EVENTS / layout.METRICS)
    ).get(last)
    return [*differences, *_rescored(run, replay, last, recorded)]


def _rescored(
    run: Path, replay: "Replay", step: int, recorded: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Yields the scores of a checkpoint that are not those that the run recorded."""
    if not recorded or step not in checkpoints.steps(run / layout.CHECKPOINTS):
        return
    from cifar10.evaluation.eval_command import Options as EvalOptions
    from cifar10.evaluation.scored_set import ScoredSet

    training = replay.training
    scored = ScoredSet(
        training.towers.state.model,
        training.settings,
        training.dataset,
        run / layout.EVALUATION_EVENTS,
        EvalOptions(num_examples=recorded["num_examples"]),
    )
    replay.go_before(step + 1)
    found = scored.score(training.towers.state.averages, training.towers.devices[0])
    for name in _SCORES:
        ours, theirs = found.scalars[name], recorded.get(name, math.nan)
        # Another processor rounds otherwise: a few images may change their class.
        if not abs(ours - theirs) <= max(1e-3, replay.bound) * max(ours, theirs, 1e-9):
            largest = abs(ours - theirs) / max(ours, 1e-9)
            yield {"step": step, "place": "scores", "largest": largest, "name": name}


def chance_to_pass(segments: int, drawn: int, tampered: int) -> float:
    """Returns the chance that none of the drawn segments is a tampered one."""
    return math.comb(segments - tampered, drawn) / math.comb(segments, drawn)


def _text(found: dict[str, Any]) -> str:
    lines = [f"Chain:    {found['chain']} checkpoints, each naming the one before"]
    if not found["chain"]:
        lines = ["Chain:    none; an earlier version wrote this run"]
    lines += [f"  BROKEN: {one}" for one in found["breaks"]]
    shown = ", ".join(f"{first:,} to {last:,}" for first, last in found["segments"])
    lines.append(f"Segments: {len(found['segments'])} of {found['of']}: {shown}")
    for one in found["differences"]:
        lines.append(f"  DIFFERS: step {one['step']:,}, {one['place']}: {one['name']}")
    if found["breaks"] or found["differences"]:
        return "\n".join([*lines, "The run is not what it says."])
    bits = "to the last bit" if not found["bound"] else f"within {found['bound']:g}"
    tenth = max(1, found["of"] // 10)
    chances = {
        "one segment": found["passes"],
        f"{tenth} segments": chance_to_pass(found["of"], len(found["segments"]), tenth),
    }
    passes = " and ".join(f"{of:.0%} with {what}" for what, of in chances.items())
    return "\n".join(
        [
            *lines,
            f"Verified: {found['verified']:.0%} of the steps, {bits}",
            f"If it was tampered with, it passes such draws by chance: {passes}.",
        ]
    )
