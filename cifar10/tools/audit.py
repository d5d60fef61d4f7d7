"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import collections
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cifar10.config import layout
from cifar10.config.fields import CALIBRATED
from cifar10.config.run_config import IS_OWN
from cifar10.errors import UsageError
from cifar10.process import files
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
    layout.METRICS: "clocks, and what rounding changes by its size",
    layout.STARTS: "each start says so of itself",
    checkpoints.MANIFEST: "clocks, and what was left out or ended early",
}
# Entries that no command shows, and a number of images, which is that of the scores.
UNSHOWN = {IS_OWN, "fresh", "part", "num_examples", "temperature", CALIBRATED}


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.add_argument("--segments", type=int, default=5, help="number to recompute")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replay, given = open_run(parser, words)
    segments = [*itertools.pairwise(sorted({replay.begun, *replay.saved}))]
    if not segments:
        raise UsageError(f"{replay.run} has too few checkpoints. Save at least two.")
    last = replay.saved[-1], max(replay.saved[-1], *replay.logged, 0)
    # The lines after the last checkpoint, unless a rollback may have left out batches.
    segments += [last] * (
        last[0] < last[1] and replay.recorded.get("on_nan") != "rollback"
    )
    manifests, breaks = _read_manifests(replay)
    breaks += [*_contradictions(replay), *_repetitions(replay)]
    count = 0 if breaks else min(given["segments"], len(segments))
    drawn = sorted(random.Random(given["seed"]).sample(segments, count))  # noqa: S311
    worst = {(first, last): compare(replay, first + 1, last) for first, last in drawn}
    agree = sum(last - first for (first, last), one in worst.items() if not one[0])
    report = {
        "exact": not replay.why_not_exact,
        "bound": f"{replay.bound:g} {replay.why_not_exact}".strip(),
        "checkpoints": len(replay.saved),
        "linked": sum(map(bool, replay.links.values())),
        "last": checkpoints.digest_of(manifests.get(replay.saved[-1])),
        "starts": [starting.in_words(one) for one in starting.read_starts(replay.run)],
        "breaks": breaks,
        "segments": len(segments),
        "recomputed": drawn,
        "differs": bool(breaks) or any(one[0] for one in worst.values()),
        "differences": [one[1:] for one in worst.values() if one[0]],
        "largest": max(worst.values())[1:] if worst else None,
        "agree": agree / segments[-1][1],
        "missed": 1 - count / len(segments),
        "unchecked": [*_unchecked(replay, manifests, last)],
    }
    rows = [(k, one) for k, v in report.items() for one in (_each(v))]
    lines = "\n".join(f"{name + ':':13}{value}" for name, value in rows)
    print(json.dumps(report, indent=2) if given["json"] else lines)
    return 1 if report["differs"] else 0


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) and value else [value]


def _read_manifests(replay: "Replay") -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Returns the manifests of intact checkpoints, and what is wrong with others."""
    manifests, breaks = {}, []
    for step in replay.saved:
        try:
            found = checkpoints.verify(replay.run / layout.CHECKPOINTS, step)
            manifests[step] = found.manifest
            restoring.check_identity(found, replay.recorded)
        except UsageError as error:
            breaks.append(f"checkpoint of step {step}: {error}")
    return manifests, breaks


def _contradictions(replay: "Replay") -> Iterator[str]:
    """Yields a message on each contradiction of a link and what it names."""
    run, recorded, links = replay.run, replay.recorded, replay.links
    lines = logs.lines_up_to(run / layout.STARTS, sys.maxsize).splitlines(keepends=True)
    starts = [hashlib.sha256(b"".join(lines[: n + 1])) for n in range(len(lines))]
    digests = [one.hexdigest() for one in starts]
    if len(starting.read_starts(run)) < len(lines):
        yield f"{layout.STARTS}: a line is damaged"
    for step, link in [(at, link) for at, link in links.items() if link]:
        where = f"checkpoint of step {step}"
        now = checkpoints.make_link(run / layout.CHECKPOINTS, step, {})
        is_deleted = link.get("step") not in (None, *replay.saved)  # The one before.
        for name in ["log"] if is_deleted else ["log", "step", "manifest"]:
            if link.get(name) != now.get(name):
                yield f"{where}: the {name} before it has changed"
        if "config" in link and link.get("starts") not in digests:
            yield f"{where}: {layout.STARTS} before it has changed"
        names = replay.determining & link["settings"].keys()
        then = {name: link["settings"][name] for name in names}
        for name, (new, old) in starting.find_differences(run, recorded, then).items():
            yield f"{layout.CONFIG}: {name} is {new!r}, but was {old!r} at step {step}"
    # A process that started later may have other settings, and have saved nothing.
    link = links.get(replay.saved[-1], {})
    is_last_start = link.get("starts") in digests[-1:]
    if is_last_start and link.get("config") != files.sha256(run / layout.CONFIG):
        yield f"{layout.CONFIG} has changed since the last checkpoint"
    for name, fact in replay.facts.items():
        if recorded.get(name, fact) != fact:
            yield f"{layout.CONFIG}: {name} is {recorded[name]!r}, not {fact!r}"


def _repetitions(replay: "Replay") -> Iterator[str]:
    """Yields a message on what is there twice, or beyond the run's last step."""
    most, last = replay.recorded["max_steps"], max([*replay.saved, *replay.logged])
    logged = [line["step"] for line in logs.read_steps(replay.run / layout.METRICS)]
    twice = [step for step, count in collections.Counter(logged).items() if count > 1]
    yield from (f"{layout.METRICS}: step {step} is there twice" for step in twice)
    starts = starting.read_starts(replay.run)
    if len({one["time"] for one in starts}) < len(starts):
        yield f"{layout.STARTS}: a start is there twice"
    ends = {"checkpoint": (replay.saved, most), layout.METRICS: (logged, most)}
    ends[layout.STARTS] = [one["step"] for one in starts], last
    for part, lines in replay.scored.items():
        ends[scores.log_of(part)] = [line["step"] for line in lines], last
    for place, (steps, end) in ends.items():
        yield from (f"{place}: step {at} is beyond {end}" for at in steps if at > end)


def _unchecked(
    replay: "Replay", manifests: Mapping[int, dict[str, Any]], last: tuple[int, int]
) -> Iterator[str]:
    """Yields the names of values that were not checked, where they are, and why."""
    recorded, (saved, logged) = replay.recorded, last
    checked = {*replay.determining, *replay.facts}
    if not recorded.get("max_epochs"):  # Only they give the last step again.
        checked -= {"max_steps"} - replay.determining
    history = starting.read_starts(replay.run)
    claims = ("time", "hours", "validation", "left_out")
    names = {
        layout.CONFIG: recorded.keys() - checked,
        **replay.unread,
        layout.STARTS: {name for one in history for name in one},
        checkpoints.MANIFEST: {
            k for one in manifests.values() for k in claims if one.get(k)
        },
    }
    for file, of in names.items():
        if shown := ", ".join(sorted(of - UNSHOWN)):
            yield f"{shown} in {file}: {UNCHECKED.get(file, 'unknown here')}"
    if old := [step for step, link in replay.links.items() if not link]:
        yield f"chain in steps {old}: an earlier version wrote these checkpoints"
    if replay.begun:
        yield f"steps in 1 to {replay.begun}: they began with weights from elsewhere"
    if saved < logged and recorded.get("on_nan") == "rollback":
        yield f"steps in {saved + 1} to {logged}: a rollback may have left out batches"
    failed = checkpoints.steps(replay.run / layout.DEBUG_CHECKPOINTS)
    if max(failed, default=0) > logged:
        yield f"step in {layout.DEBUG_CHECKPOINTS}: steps that failed are not computed"
