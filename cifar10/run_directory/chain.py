"""The chain of a run's checkpoints: each records all that came before it.

`chain.jsonl` holds the manifest of every checkpoint that the run has written on its way
to the newest one, even if it has been deleted. A manifest holds the SHA-256 of its
files, what determines the result, and the SHA-256 that `chain.jsonl` and the log had
when it was written. So whoever changes one of these has to rewrite all later manifests,
which then differ from every copy made before.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, options
from cifar10.process import files
from cifar10.run_directory import checkpoints, logs
from cifar10.run_directory.checkpoints import Checkpoint

FILE = "chain.jsonl"
ENTRY = "chain"  # Of a manifest.
_CODE = "versions"  # Another one may have continued the run.
_GROWING = (FILE, layout.METRICS)  # What lines are only appended to.


def read(run: Path) -> dict[int, dict[str, Any]]:
    """Returns the manifests of a run's checkpoints by step; none for an older run."""
    return {
        link["step"]: link
        for link in logs.read_steps(run / FILE)
        if checkpoints.is_plausible(link) and isinstance(link.get(ENTRY, {}), dict)
    }


def manifests(run: Path) -> dict[int, dict[str, Any]]:
    """Returns those of `read`, and of checkpoints that have no line there, by step."""
    found, directory = read(run), run / layout.CHECKPOINTS
    for step in {*checkpoints.steps(directory)} - found.keys():  # Of an older run.
        with contextlib.suppress(checkpoints.DamagedError):
            found[step] = checkpoints.read_manifest(directory, step)
    return found


def make_link(run: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the manifest of a new checkpoint says of the chain.

    `origin` are the entries of `config.json` from which the run is computed.
    """
    entry = dict(origin)
    for name in _GROWING:
        with contextlib.suppress(OSError):  # It may be absent; no checkpoint is lost.
            entry[name] = files.sha256(run / name)
    return {ENTRY: entry}


def append(run: Path, step: int) -> None:
    """Adds the manifest of a checkpoint that is complete."""
    manifest = checkpoints.read_manifest(run / layout.CHECKPOINTS, step)
    logs.append_line(run / FILE, manifest)


def go_back(run: Path, checkpoint: Checkpoint | None) -> None:
    """Ends the chain with the checkpoint that a run resumes from.

    A process that was killed may not have added its last checkpoint.
    """
    logs.drop_later_lines(run / FILE, checkpoint.step - 1 if checkpoint else -1)
    if checkpoint:
        append(run, checkpoint.step)


def find_breaks(run: Path, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yields what contradicts the chain of a run whose `config.json` is `recorded`."""
    links, now = read(run), {**options.defaults(fields.ALL), **recorded}
    known = {name: _digests(run / name) for name in _GROWING}
    # Before its first entry, the run was of a version that wrote none.
    begun = min((step for step in links if ENTRY in links[step]), default=math.inf)
    if (count := len(logs.read_lines(run / FILE))) != len(links):
        yield f"{FILE}: {len(links)} of its {count} lines are the manifest of a step"
    for step, link in links.items():
        for name, then in link.get(ENTRY, {}).items():
            if name in known and str(then) not in known[name]:
                yield f"checkpoint of step {step}: {name} is not what was there then"
            if name not in (*known, _CODE) and now.get(name, then) != then:
                yield f"{layout.CONFIG}: {name} is {now[name]!r}, and was {then!r}"
    directory = run / layout.CHECKPOINTS
    for step in checkpoints.steps(directory):
        try:
            manifest = checkpoints.verify(directory, step).manifest
        except checkpoints.DamagedError as error:
            yield f"checkpoint of step {step}: {error}"
            continue
        if step not in links and (ENTRY in manifest or step > begun):
            yield f"checkpoint of step {step}: {FILE} is missing, or its line there"
        elif links.get(step, manifest) != manifest:
            yield f"checkpoint of step {step}: its manifest is not the one in {FILE}"


def _digests(path: Path) -> set[str]:
    """Returns the SHA-256 that a log had before its first line, and after each."""
    content, digest = b"", hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        content = files.read(path, logs.LARGEST_LOG)
    found = {digest.hexdigest()}
    for line in content.splitlines(keepends=True):
        digest.update(line)
        found.add(digest.hexdigest())
    return found
