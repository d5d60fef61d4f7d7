"""The chain of a run's checkpoints: each names the one before it by its digest.

`chain.jsonl` holds the manifest of every checkpoint that the run has written on its way
to the newest one, those that were deleted since included. A manifest holds the SHA-256
of its files, of the lines logged since the checkpoint before, and of what determines
the result; and it holds the digest of the manifest before. So whoever changes any of
these has to write all later manifests anew, and no copy of one agrees any more.
"""

import bisect
import contextlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.errors import DiskError
from cifar10.process import files
from cifar10.run_directory import checkpoints, logs

FILE = "chain.jsonl"
ENTRY = "chain"  # Of a manifest.
_STEP = operator.itemgetter("step")
# Of a line of the log: two runs that compute the same differ in these.
_TIMES = ("time", "seconds", "examples_per_sec")
# What is wrong with a checkpoint where its entry is not what it has to be. The code is
# no part of it, as another version may have continued the run.
_BREAKS = {
    "previous": f"it does not follow the one before it in {FILE}",
    "log": f"the lines of {layout.METRICS} before it are not its own",
    "config": "its settings are not those of the run",
    "data": "its data is not that of the run",
}


def read(run: Path) -> list[dict[str, Any]]:
    """Returns the manifests of a run's checkpoints, in order; none in an older run."""
    return [
        link
        for link in logs.read_steps(run / FILE)
        if checkpoints.is_plausible(link) and isinstance(link.get(ENTRY, {}), dict)
    ]


def make_link(run: Path, step: int, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the manifest of a new checkpoint says of the chain."""
    last: Mapping[str, Any] = {"step": 0, "sha256": ""}
    log: Sequence[Mapping[str, Any]] = ()
    with contextlib.suppress(DiskError):  # No checkpoint is lost; an audit shows it.
        *_, last = [last, *read(run)]
        log = logs.read_steps(run / layout.METRICS)
    digest = digest_of_log(log, last["step"], step)
    return {ENTRY: {**origin, "previous": last.get("sha256"), "log": digest}}


def append(run: Path, checkpoint: Path) -> None:
    """Adds the manifest of a checkpoint that is complete."""
    manifest = json.loads(files.read(checkpoint / checkpoints.MANIFEST))
    logs.append_line(run / FILE, manifest)


def go_back(run: Path, checkpoint: checkpoints.Checkpoint | None, step: int) -> None:
    """Drops what is later than the checkpoint that a run resumes from.

    A process that was killed may not have added that one.
    """
    logs.drop_later_lines(run / FILE, step)
    if checkpoint and step not in [link["step"] for link in read(run)]:
        append(run, checkpoint.path)


def digest_of_log(log: Sequence[Mapping[str, Any]], after: int, last: int) -> str:
    """Returns the SHA-256 of what a log says of some steps, but for times."""
    start, end = (bisect.bisect(log, at, key=_STEP) for at in (after, last))
    return checkpoints.digest_of(
        [
            {name: of for name, of in line.items() if name not in _TIMES}
            for line in log[start:end]
        ]
    )


def find_breaks(run: Path, origin: Mapping[str, Any]) -> Iterator[str]:
    """Yields what contradicts the chain of a run, whose origin now is `origin`."""
    links, log = read(run), logs.read_steps(run / layout.METRICS)
    previous: Any = ""
    before = 0
    for link in links:
        step, entry = link["step"], link.get(ENTRY, {})
        manifest = {name: of for name, of in link.items() if name != "sha256"}
        if link.get("sha256") != checkpoints.digest_of(manifest):
            yield f"checkpoint of step {step}: its manifest in {FILE} was edited"
        if entry or previous:  # An older version may have begun the run.
            own = {"previous": previous, "log": digest_of_log(log, before, step)}
            for name, expected in {**origin, **own}.items():
                if name in _BREAKS and entry.get(name) != expected:
                    yield f"checkpoint of step {step}: {_BREAKS[name]}"
        previous, before = link.get("sha256"), step
    directory = run / layout.CHECKPOINTS
    known = {link["step"]: link for link in links}
    for step in checkpoints.steps(directory):
        try:
            manifest = checkpoints.verify(directory, step).manifest
        except checkpoints.DamagedError as error:
            yield f"checkpoint of step {step}: {error}"
            continue
        link = {**manifest, "sha256": checkpoints.digest_of(manifest)}
        if (links or ENTRY in manifest) and known.get(step) != link:
            yield f"checkpoint of step {step}: its manifest is not the one in {FILE}"
