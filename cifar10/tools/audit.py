"""`python -m cifar10 audit`: checks a run, by its chain and by recomputing parts."""

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cifar10.config import layout
from cifar10.config.options import Count, Range
from cifar10.errors import UsageError, counted, say
from cifar10.run_directory import chain, checkpoints, logs, scores
from cifar10.tools.replay import ReplayOptions, open_run

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
    replay, options = open_run(parser, words, Options)
    found = audit_run(replay, options.segments, options.seed)
    print(json.dumps(found, indent=2) if options.json else _text(found))
    return 1 if found["breaks"] or found["differences"] else 0


def audit_run(replay: "Replay", count: int, seed: int) -> dict[str, Any]:
    """Checks the chain of a run, and recomputes some of its segments.

    Returns what contradicts the chain as `breaks`, and the recomputed steps and scores
    that differ as `differences`; the `segments` that were drawn; the part of the run's
    steps that is `verified`; `passes`, the chance with which these draws miss a run of
    which one segment was tampered with.
    """
    ends = checkpoints.steps(replay.run / layout.CHECKPOINTS)
    if not replay.recorded.get("initial_weights"):
        ends = [0, *ends]  # The initial values follow from the seed.
    segments = [*itertools.pairwise(ends)]
    if not segments:
        raise UsageError(
            f"{replay.run} has no two checkpoints to recompute a segment between."
        )
    drawn = random.Random(seed).sample(segments, min(count, len(segments)))  # noqa: S311
    differences = []
    for first, last in sorted(drawn):
        say(f"Recomputing steps {first + 1:,} to {last:,} ...")
        replay.go_before(first + 1)
        compared = replay.compare(first + 1, last)
        differing = (one for one in compared if one.largest > one.bound)
        differences += [one._asdict() for one in itertools.islice(differing, 1)]
        differences += _rescore(replay, last)
    steps = sum(last - first for first, last in drawn)
    return {
        "chain": len(chain.read(replay.run)),
        "breaks": [*chain.find_breaks(replay.run, replay.training.origin)],
        "segments": sorted(drawn),
        "of": len(segments),
        "differences": differences,
        "bound": replay.bound,
        "verified": 0.0 if differences else steps / max([ends[-1], *replay.logged]),
        "passes": 1 - len(drawn) / len(segments),
    }


def _rescore(replay: "Replay", step: int) -> Iterator[dict[str, Any]]:
    """Yields the scores of a checkpoint that are not those that the run recorded."""
    from cifar10.evaluation.eval_command import Options as EvalOptions
    from cifar10.evaluation.scored_set import ScoredSet
    from cifar10.towers.verification import proportion
    from cifar10.training.replay import as_logged

    events = replay.run / layout.EVALUATION_EVENTS
    log = logs.read_lines(events / layout.METRICS)
    recorded = scores.comparable(log).get(step)
    if recorded is None:
        return
    training = replay.training
    scored = ScoredSet(
        training.towers.state.model,
        training.settings,
        training.dataset,
        events,
        EvalOptions(num_examples=recorded["num_examples"]),
    )
    replay.go_before(step + 1)
    found = scored.score(training.towers.state.averages, training.towers.devices[0])
    # Another processor rounds otherwise: a few images may change their class.
    bound = max(1e-3, replay.bound)
    for name in _SCORES:
        pair = found.scalars[name], recorded.get(name)
        largest = proportion(*map(as_logged, pair))
        if largest > bound:
            yield {"step": step, "place": "scores", "largest": largest, "name": name}


def _text(found: dict[str, Any]) -> str:
    count, of = len(found["segments"]), found["of"]
    lines = [f"Chain:    {counted(found['chain'], 'checkpoint')}"]
    if not found["chain"]:
        lines = ["Chain:    none; an earlier version wrote this run"]
    elif not found["breaks"]:
        lines[0] += ", each as the next one says"
    lines += [f"  BROKEN: {one}" for one in found["breaks"]]
    shown = ", ".join(f"{first:,} to {last:,}" for first, last in found["segments"])
    lines.append(f"Segments: {count} of {of}: {shown}")
    for one in found["differences"]:
        lines.append(f"  DIFFERS: step {one['step']:,}, {one['place']}: {one['name']}")
    if found["breaks"] or found["differences"]:
        return "\n".join([*lines, "The run is not what it says."])
    bits = f"within {found['bound']:g}" if found["bound"] else "to the last bit"
    lines.append(f"Verified: {found['verified']:.0%} of the steps, {bits}")
    chance = f"{found['passes']:.0%}"
    lines.append(f"A run with one segment tampered with passes such draws in {chance}.")
    return "\n".join(lines)
