"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import collections
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cifar10 import files
from cifar10.config import layout
from cifar10.config.fields import CALIBRATED
from cifar10.config.schema import EVENT, SCORES, wrong
from cifar10.errors import UsageError, say
from cifar10.run_directory import checkpoints, logs, restoring, scores, starting
from cifar10.tools.replay import compare, open_run

if TYPE_CHECKING:
    from cifar10.training.replay import Replay

HELP = "find out whether a run was altered, by checksums and by recomputing steps"
DESCRIPTION = """Finds out whether a run was altered, by checksums and recomputation.

    python -m cifar10 audit runs/cifar10_train --segments 5 --seed 7

Checks the manifests' checksums, then recomputes segments between checkpoints,
drawn by a --seed to be chosen after the run. Lists what it could not check
under `unchecked`. Exit code 1: something differs.
"""
# Why values stay unchecked that no computation gives again, by file.
UNCHECKED = {
    layout.CONFIG: "no number depends on them",
    layout.METRICS: "clocks, values that rounding may change entirely, or unknown here",
    layout.STARTS: "claims that each start makes about itself",
    checkpoints.MANIFEST: "clocks, and what was left out or ended early",
}
# Entries that no command shows, and a number of images, which is that of the scores.
UNSHOWN = {
    *("part", "num_examples", "temperature", CALIBRATED, "model_logits"),
    *("data_sample", "data_uncorrected"),
}


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.add_argument("--segments", type=int, default=5, help="segments to recompute")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replay, given = open_run(parser, words)
    if not (segments := [*itertools.pairwise(sorted({replay.origin, *replay.saved}))]):
        raise UsageError(f"{replay.run} has too few checkpoints. Save at least two.")
    saved, logged = replay.saved[-1], max(replay.saved[-1], *replay.logged, 0)
    rolls_back = replay.recorded.config.checkpoints.on_nan == "rollback"
    if saved < logged and not rolls_back:  # A rollback may leave batches out.
        segments.append((saved, logged))
    breaks = [*_contradictions(replay), *_repetitions(replay, logged)]
    count = 0 if breaks else min(given["segments"], len(segments))
    drawn = sorted(random.Random(given["seed"]).sample(segments, count))  # noqa: S311
    say(f"Recomputing {sum(last - first for first, last in drawn):,} steps ...")
    worst = {at: compare(replay, at[0] + 1, at[1])[0] for at in drawn}
    agree = sum(last - first for (first, last), one in worst.items() if not one[0])
    report = {
        "exact": not replay.why_not_exact,
        "bound": f"{replay.bound:g} {replay.why_not_exact}".strip(),
        "checkpoints": len(replay.saved),
        "linked": sum(map(bool, replay.links.values())),
        "last": checkpoints.digest_of(replay.manifests.get(saved)),
        "starts": starting.read_starts(replay.run),
        "breaks": breaks,
        "segments": len(segments),
        "recomputed": drawn,
        "differs": bool(breaks) or any(one[0] for one in worst.values()),
        "differences": [one[1:] for one in worst.values() if one[0]],
        "largest": max(worst.values())[1:] if worst else None,
        "agree": agree / segments[-1][1],
        "missed": 1 - count / len(segments),
        "unchecked": [*_unchecked(replay, saved, logged)],
    }
    lines = []
    for name, value in report.items():  # A list has a line for each of its items.
        several = value if isinstance(value, list) and value else [value]
        lines += [f"{name + ':':13}{one}" for one in several]
    print(json.dumps(report, indent=2) if given["json"] else "\n".join(lines))
    return 1 if report["differs"] else 0


def _contradictions(replay: "Replay") -> Iterator[str]:
    """Yields a message on each contradiction of the checkpoints, config and starts."""
    run, recorded = replay.run, replay.recorded
    history = starting.read_starts(run)  # First, as it refuses what is not a file.
    lines = logs.lines_up_to(run / layout.STARTS, sys.maxsize).splitlines(keepends=True)
    starts = [hashlib.sha256(part).hexdigest() for part in itertools.accumulate(lines)]
    if len(history) < len(lines):
        yield f"{layout.STARTS}: a line is not a start"
    for step in replay.saved:
        where = f"checkpoint of step {step}"
        try:
            found = checkpoints.verify(run / layout.CHECKPOINTS, step)
            restoring.check_identity(found, recorded)
        except UsageError as error:
            yield f"{where}: {error}"
        if not (link := replay.links.get(step)):
            continue
        yield from (f"{where}: {one}" for one in _broken(replay, step, link, starts))
    # A process that started later may have other settings, and have saved nothing.
    link = replay.links.get(replay.saved[-1]) or {}
    is_last_start = link.get("starts") in starts[-1:]
    if is_last_start and link.get("config") != files.sha256(run / layout.CONFIG):
        yield f"{layout.CONFIG} has changed since the last checkpoint"
    facts = {k: fact for k, fact in replay.facts.items() if k in recorded.entries}
    for name, (said, fact) in starting.find_differences(recorded, facts).items():
        yield f"{layout.CONFIG}: {name} is {said!r}, not {fact!r}"


def _broken(
    replay: "Replay", step: int, link: dict[str, Any], starts: Sequence[str]
) -> Iterator[str]:
    """Yields what has changed since a link was made; `starts` are possible digests."""
    now = checkpoints.make_link(replay.run / layout.CHECKPOINTS, step, {})
    is_deleted = link.get("step") not in (None, *replay.saved)  # The one before.
    for name in ["log"] if is_deleted else ["log", "step", "manifest"]:
        if link.get(name) != now.get(name):
            yield f"the {name} before it has changed"
    if "config" in link and link.get("starts") not in starts:
        yield f"{layout.STARTS} before it has changed"
    names = replay.determining & link["settings"].keys()
    then = {name: link["settings"][name] for name in names}
    for name, (new, old) in starting.find_differences(replay.recorded, then).items():
        yield f"{name} was {old!r}, but is {new!r} in {layout.CONFIG}"


def _repetitions(replay: "Replay", last: int) -> Iterator[str]:
    """Yields messages on entries that are repeated, invalid or beyond the run's end."""
    most = replay.recorded.config.run.max_steps
    logged = [line["step"] for line in logs.read_steps(replay.run / layout.METRICS)]
    # Readers pass over the others; what a killed process has left is None.
    written = logs.read_lines(replay.run / layout.METRICS)
    if sum(map(bool, written)) > len(logged) + len(logs.intact(written, EVENT)):
        yield f"{layout.METRICS}: a line has no step"
    if 0 in logged:
        yield f"{layout.METRICS}: step 0 is before the first"
    twice = [step for step, count in collections.Counter(logged).items() if count > 1]
    yield from (f"{layout.METRICS}: step {step} appears twice" for step in twice)
    starts = starting.read_starts(replay.run)
    if len({one["time"] for one in starts}) < len(starts):
        yield f"{layout.STARTS}: a start appears twice"
    ends = {"checkpoint": (replay.saved, most), layout.METRICS: (logged, most)}
    ends[layout.STARTS] = [one["step"] for one in starts], last
    for split, lines in replay.scored.items():
        ends[scores.log_of(split)] = [line["step"] for line in lines], last
        entries = logs.read_lines(replay.run / scores.log_of(split))
        odd = [one for one in entries if one and wrong(one, SCORES, needs_all=True)]
        yield from (f"{scores.log_of(split)}: {one} holds no scores" for one in odd)
    for place, (steps, end) in ends.items():
        yield from (f"{place}: step {at} is beyond {end}" for at in steps if at > end)


def _unchecked(replay: "Replay", saved: int, logged: int) -> Iterator[str]:
    """Yields the names of values that were not checked, where they are, and why."""
    recorded = replay.recorded
    checked = {*replay.determining, *replay.facts}
    if not recorded.config.run.max_epochs:  # Only max_epochs determines max_steps.
        checked -= {"max_steps"} - replay.determining
    claims = ("time", "hours", "validation", "left_out", "gradient_noise")
    names = {
        # What was taken out of it, too: a default is shown in its place.
        layout.CONFIG: (recorded.entries.keys() - checked)
        | (recorded.values.keys() - recorded.entries.keys()),
        **replay.unread,
        layout.STARTS: {*itertools.chain(*starting.read_starts(replay.run))},
        checkpoints.MANIFEST: {*claims},
    }
    for file, entries in names.items():
        if shown := ", ".join(sorted(entries - UNSHOWN)):
            yield f"{shown} in {file}: {UNCHECKED.get(file, 'unknown here')}"
    if old := [step for step, link in replay.links.items() if not link]:
        yield f"chain in steps {old}: an earlier version wrote these checkpoints"
    if recorded.config.fine_tuning.initial_weights:
        yield f"steps in 0 to {replay.origin}: they began with weights from elsewhere"
    if saved < logged and recorded.config.checkpoints.on_nan == "rollback":
        yield f"steps in {saved + 1} to {logged}: a rollback may have left out batches"
    scored = {line["step"] for lines in replay.scored.values() for line in lines}
    if replay.bound and (loose := sorted(scored - {0, *replay.saved})):
        yield f"scores in steps {loose}: without checkpoints, within {replay.bound:g}"
    if early := sorted(at for at in scored if 0 < at < replay.origin):
        yield f"scores in steps {early}: without checkpoints"
    failed = checkpoints.steps(replay.run / layout.DEBUG_CHECKPOINTS)
    if max(failed, default=0) > logged:
        yield f"step in {layout.DEBUG_CHECKPOINTS}: failed steps are not recomputed"
