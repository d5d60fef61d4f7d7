"""`python -m cifar10 audit`: checks a run's checksums and recomputes some steps."""

import argparse
import collections
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.config import layout
from cifar10.config.fields import CALIBRATION_ERROR
from cifar10.config.run_config import IS_OWN
from cifar10.errors import UsageError
from cifar10.process import files
from cifar10.run_directory import checkpoints, logs, restoring, scores, starting
from cifar10.run_directory.early_stopping import EarlyStopping
from cifar10.run_directory.schema import Start, wrong
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
# Why the values of a file stay unchecked that no computation gives again.
UNCHECKED = {
    layout.CONFIG: "no number depends on them; the run says so of itself",
    layout.METRICS: "clocks, speeds, and what rounding changes by its size",
    layout.STARTS: "each start says so of itself",
    checkpoints.MANIFEST: "clocks, and batches that a rollback has left out",
}
# Entries that no command shows, by file.
UNSHOWN = {
    layout.CONFIG: {IS_OWN, "fresh"},
    **dict.fromkeys(
        [
            f"{layout.evaluation_events(part)}/{layout.METRICS}"
            for part in ("test", "val")
        ],
        {"part", "num_examples", "temperature", f"{CALIBRATION_ERROR} at temperature"},
    ),
}


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.add_argument("--segments", type=int, default=5, help="number to recompute")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replay, given = open_run(parser, words)
    if not replay.saved:
        raise UsageError(f"{replay.run} has no checkpoint. Save at least one.")
    links, breaks = _read_links(replay)
    breaks += [*_check_settings(replay, links), *_check_logs(replay)]
    segments = [*itertools.pairwise(sorted({replay.begun, *replay.saved}))]
    tail = replay.saved[-1], max([*replay.logged, 0])
    if tail[1] > tail[0] and replay.recorded.get("on_nan") != "rollback":
        segments.append(tail)  # Lines after the last checkpoint.
    count = 0 if breaks else min(given["segments"], len(segments))
    drawn = sorted(random.Random(given["seed"]).sample(segments, count))  # noqa: S311
    worst = {(first, last): compare(replay, first + 1, last) for first, last in drawn}
    agree = sum(last - first for (first, last), one in worst.items() if not one[0])
    differs = bool(breaks) or any(one[0] for one in worst.values())
    report = {
        "exact": not replay.why_not_exact,
        "bound": replay.bound,
        "why_not_exact": replay.why_not_exact or None,
        "checkpoints": len(replay.saved),
        "linked": len(links),  # Checkpoints of an earlier version have no link.
        "last": files.sha256(_manifest(replay, replay.saved[-1])),
        "starts": starting.read_starts(replay.run),
        "breaks": breaks,
        "segments": len(segments),
        "recomputed": drawn,
        "differs": differs,
        "differences": [one[1:] for one in worst.values() if one[0]],
        "largest": max(worst.values())[1:] if worst else None,
        "agree": agree / max(1, segments[-1][1]) if segments else 0.0,
        "missed": 1 - count / max(1, len(segments)),
        "unchecked": [*_find_unchecked(replay, links, tail)],
    }
    print(json.dumps(report, indent=2) if given["json"] else _as_text(report))
    return 1 if differs else 0


def _as_text(report: Mapping[str, Any]) -> str:
    lines = []
    for name, value in report.items():
        for one in value if name in ("starts", "breaks", "unchecked") else [value]:
            text = one
            if name == "unchecked":
                text = (
                    f"{', '.join(one['names']) or 'all'} in {one['in']}: {one['why']}"
                )
            elif name == "starts":
                text = starting.in_words(one)
            lines.append(f"{name + ':':15}{text}")
    return "\n".join(lines)


def _manifest(replay: "Replay", step: int) -> Path:
    directory = replay.run / layout.CHECKPOINTS
    return checkpoints.folder(directory, step) / checkpoints.MANIFEST


def _read_links(replay: "Replay") -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Returns the links by step, and a message on each contradiction between them."""
    directory, links, breaks = replay.run / layout.CHECKPOINTS, {}, []
    for step in replay.saved:
        where = f"checkpoint of step {step}"
        try:
            link = checkpoints.read_link(directory, step)
            restoring.check_identity(
                checkpoints.verify(directory, step), replay.recorded
            )
        except checkpoints.DamagedError as error:
            breaks.append(f"{where}: {error}")
            continue
        except UsageError as error:
            breaks.append(str(error))
        if step > replay.recorded["max_steps"]:
            breaks.append(f"{where} is beyond max_steps in {layout.CONFIG}")
        if not link:
            continue  # An earlier version wrote the manifest.
        links[step] = link
        now = checkpoints.make_link(directory, step, {})
        is_deleted = link.get("step") not in (None, *replay.saved)  # The one before.
        breaks += [
            f"{where}: the {name} before it has changed"
            for name in (["log"] if is_deleted else ["log", "step", "manifest"])
            if link.get(name) != now.get(name)
        ]
    return links, breaks


def _check_settings(
    replay: "Replay", links: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a message on each contradiction of the links and config.json or starts."""
    path = replay.run / layout.STARTS
    lines = path.exists() and files.read(path).splitlines(keepends=True) or []
    parts = [hashlib.sha256(b"".join(lines[:n])) for n in range(len(lines) + 1)]
    starts = [part.hexdigest() for part in parts]
    if len(starting.read_starts(replay.run)) < len(lines):
        yield f"{layout.STARTS}: a line is damaged"
    for step, link in links.items():
        names = replay.determining & link["settings"].keys()
        then = {name: link["settings"][name] for name in names}
        changed = starting.find_differences(replay.run, replay.recorded, then)
        for name, (now, was) in changed.items():
            yield f"{layout.CONFIG}: {name} is {now!r}, but was {was!r} at step {step}"
        if "config" in link and link.get("starts") not in starts[1:]:
            yield f"checkpoint of step {step}: {layout.STARTS} before it has changed"
    # A process that started later may have had other settings, and saved nothing.
    last = links.get(replay.saved[-1], {})
    if last.get("starts") == starts[-1]:
        if last.get("config") != files.sha256(replay.run / layout.CONFIG):
            yield f"{layout.CONFIG} has changed since the last checkpoint"
    for name, now in replay.facts.items():
        if replay.recorded.get(name, now) != now:
            yield f"{layout.CONFIG}: {name} is {replay.recorded[name]!r}, not {now!r}"


def _check_logs(replay: "Replay") -> Iterator[str]:
    """Yields a message on each line that is there twice, or beyond the run."""
    lines = logs.read_steps(replay.run / layout.METRICS)
    for step, count in collections.Counter(line["step"] for line in lines).items():
        if count > 1:
            yield f"{layout.METRICS}: step {step} is there {count} times"
        if step > replay.recorded["max_steps"]:
            yield f"{layout.METRICS}: step {step} is beyond max_steps"
    last = max([*replay.saved, *replay.logged])
    for part in ("test", "val"):
        log = f"{layout.evaluation_events(part)}/{layout.METRICS}"
        for line in scores.compared(logs.read_lines(replay.run / log)):
            if line["step"] > last:
                yield f"{log}: step {line['step']} is beyond the run's last one"


def _find_unchecked(
    replay: "Replay", links: Mapping[int, Mapping[str, Any]], tail: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """Yields the names of what is unchecked, the file, and the reason."""
    recorded, (saved, logged) = replay.recorded, tail
    directory = replay.run / layout.CHECKPOINTS
    checked = replay.determining | {*replay.facts}
    if not recorded.get("max_epochs"):  # Only they give the last step again.
        checked -= {"max_steps"} - replay.determining
    names = {layout.CONFIG: recorded.keys() - checked, **replay.unread()}
    if (replay.run / layout.STARTS).exists():
        names[layout.STARTS] = {"step", "time", "machine", "devices", "versions"}
    manifests = [checkpoints.read_manifest(directory, at) for at in links]
    found = {name for one in manifests for name in ("time", "hours") if name in one}
    names[checkpoints.MANIFEST] = found | (
        {"left_out"} if any(one.get("left_out") for one in manifests) else set()
    )
    for file, of in names.items():
        if shown := sorted(of - UNSHOWN.get(file, set())):
            yield {
                "names": shown,
                "in": file,
                "why": UNCHECKED.get(file, "unknown here"),
            }
    if before := [step for step in replay.saved if step not in links]:
        why = "an earlier version wrote these checkpoints without a link"
        yield {"names": ["chain"], "in": f"steps {before}", "why": why}
    if replay.begun:
        why = "the run began with weights from elsewhere"
        yield {"names": [], "in": f"steps 1 to {replay.begun}", "why": why}
    if logged > saved and recorded.get("on_nan") == "rollback":
        why = "a rollback after the last checkpoint may have left out batches"
        yield {"names": [], "in": f"steps {saved + 1} to {logged}", "why": why}
    debugged = checkpoints.steps(replay.run / layout.DEBUG_CHECKPOINTS)
    if max(debugged, default=0) > max(saved, logged):
        why = "a step that failed is not computed again"
        yield {"names": ["step"], "in": layout.DEBUG_CHECKPOINTS, "why": why}
    yield from _check_record(replay, manifests[-1] if manifests else {})


def _check_record(
    replay: "Replay", manifest: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Says if the record of early stopping does not follow from the scores."""
    found, period = manifest.get("validation"), replay.recorded.get("eval_steps")
    if not found:
        return
    record = EarlyStopping(best_by=found["best_by"])
    log = layout.evaluation_events(scores.deciding_part(replay.run))
    lines = logs.read_lines(replay.run / log / layout.METRICS)
    for step, line in scores.comparable(lines).items():
        is_due = period and step % period == 0 and step <= manifest["step"]
        if is_due and record.best_by in line:
            record = record.updated(step, line[record.best_by], line["num_examples"])
    if record.to_manifest().get("validation") != found:
        why = "it does not follow from the scores; --eval_steps may have been another"
        yield {"names": ["validation"], "in": checkpoints.MANIFEST, "why": why}
