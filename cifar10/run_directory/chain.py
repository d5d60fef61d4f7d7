"""The chain of a run's checkpoints: each names the one before it by its digest.

`chain.jsonl` holds the manifest of every checkpoint that the run has written on its way
to the newest one, those that were deleted since included. A manifest holds the SHA-256
of its files, of the lines logged since the checkpoint before, and of what determines
the result; and it holds the digest of the manifest before. So whoever changes any of
these has to write all later manifests anew, and no copy of one agrees any more.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.process import files
from cifar10.run_directory import checkpoints, logs

FILE = "chain.jsonl"
ENTRY = "chain"  # Of a manifest.
# Of a line of the log: two runs that compute the same differ in these.
_TIMES = ("time", "seconds", "examples_per_sec")


def read(run: Path) -> list[dict[str, Any]]:
    """Returns the manifests of a run's checkpoints, in order; none in an older run."""
    entries = logs.read_lines(run / FILE)
    return [one for one in entries if isinstance(one, dict) and _is_step(one)]


def describe_origin(
    settings: Mapping[str, Any], determining: Sequence[str]
) -> dict[str, Any]:
    """Returns digests of what a run is computed from: settings, data and code."""
    known = {name: settings.get(name) for name in sorted(determining)}
    return {
        "config": digest_of(known),
        "data": settings.get("data_fingerprint"),
        "code": settings.get("versions"),
    }


def make_link(run: Path, step: int, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the manifest of a new checkpoint says of the chain."""
    *_, last = [{}, *read(run)]
    log = digest_of_log(run, last.get("step", 0), step)
    return {ENTRY: {"previous": last.get("sha256", ""), "log": log, **origin}}


def append(run: Path, checkpoint: Path) -> None:
    """Adds the manifest of a checkpoint that is complete."""
    logs.append_line(
        run / FILE, json.loads(files.read(checkpoint / checkpoints.MANIFEST))
    )


def cut_to(run: Path, checkpoint: Path | None, step: int) -> None:
    """Drops what is later than the checkpoint that a run resumes from.

    A process that was killed may not have added that one.
    """
    links = read(run)
    kept = [link for link in links if link["step"] <= step]
    if len(kept) < len(links):
        lines = (f"{json.dumps(link)}\n".encode() for link in kept)
        files.write_atomically(run / FILE, lines)
    if checkpoint and step not in [link["step"] for link in kept]:
        append(run, checkpoint)


def digest_of_log(run: Path, after: int, last: int) -> str:
    """Returns the SHA-256 of what `metrics.jsonl` says of some steps, but for times."""
    lines = [
        {name: of for name, of in line.items() if name not in _TIMES}
        for line in logs.read_lines(run / layout.METRICS)
        if isinstance(line, dict) and after < line.get("step", 0) <= last
    ]
    return digest_of(lines)


def digest_of(value: Any) -> str:
    """Returns the SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def find_breaks(run: Path, origin: Mapping[str, Any]) -> Iterator[str]:
    """Yields what contradicts the chain of a run, the earliest first.

    `origin` is that of the run as it is now; its code may have changed on the way.
    """
    links, previous = read(run), ""
    manifests = {link["step"]: link for link in links}
    before = 0
    for link in links:
        step, entry = link["step"], link.get(ENTRY, {})
        where = f"checkpoint of step {step}"
        told = {name: one for name, one in link.items() if name != "sha256"}
        if link.get("sha256") != digest_of(told):
            yield f"{where}: its manifest in {FILE} was edited"
        if entry and entry.get("previous") != previous:
            yield f"{where}: it does not follow the one before it in {FILE}"
        if entry and entry.get("log") != digest_of_log(run, before, step):
            yield f"{where}: the lines of {layout.METRICS} before it are not its own"
        for name in ("config", "data"):
            if entry and entry.get(name) != origin[name]:
                yield f"{where}: its {name} is not that of the run now"
        previous, before = link.get("sha256", ""), step
    directory = run / layout.CHECKPOINTS
    for step in checkpoints.steps(directory):
        where = f"checkpoint of step {step}"
        try:
            found = checkpoints.verify(directory, step)
        except checkpoints.DamagedError as error:
            yield f"{where}: {error}"
            continue
        told = {
            name: of for name, of in manifests.get(step, {}).items() if name != "sha256"
        }
        if links and found.manifest != told:
            yield f"{where}: its manifest is not the one in {FILE}"


def _is_step(link: Mapping[str, Any]) -> bool:
    return type(link.get("step")) is int and type(link.get("left_out", 0)) is int
