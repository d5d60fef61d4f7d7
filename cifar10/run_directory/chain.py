"""The chain of a run's checkpoint manifests, which reveals later changes to the run.

`chain.jsonl` holds the manifest of every checkpoint up to the newest one, including
deleted checkpoints. A manifest records the SHA-256 of the checkpoint's files, the
settings that determine the result, and the SHA-256 that `chain.jsonl` and
`metrics.jsonl` had at that time. Whoever changes any of these has to rewrite all later
manifests, which then differ from copies made before.
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
ENTRY = "chain"  # The key of this record in a manifest.
_CODE = "versions"  # May change while a run continues.
_GROWING = (FILE, layout.METRICS)  # Lines are only appended to these files.


def read(run: Path) -> dict[int, dict[str, Any]]:
    """Maps each step in `chain.jsonl` to its manifest; empty if the file is missing."""
    return {
        link["step"]: link
        for link in logs.read_steps(run / FILE)
        if checkpoints.is_plausible(link) and isinstance(link.get(ENTRY, {}), dict)
    }


def manifests(run: Path) -> dict[int, dict[str, Any]]:
    """Returns a run's manifests by step, from `chain.jsonl` or the checkpoints."""
    found, directory = read(run), run / layout.CHECKPOINTS
    for step in {*checkpoints.steps(directory)} - found.keys():  # Not in `chain.jsonl`.
        with contextlib.suppress(checkpoints.DamagedError):
            found[step] = checkpoints.read_manifest(directory, step)
    return found


def make_link(run: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `chain` entry for the manifest of a new checkpoint.

    `origin` holds the entries of `config.json` that determine the run's result.
    """
    entry = dict(origin)
    for name in _GROWING:
        with contextlib.suppress(OSError):  # Saving must not fail here.
            entry[name] = files.sha256(run / name)
    return {ENTRY: entry}


def append(run: Path, step: int) -> None:
    """Appends the manifest of a complete checkpoint to `chain.jsonl`."""
    manifest = checkpoints.read_manifest(run / layout.CHECKPOINTS, step)
    logs.append_line(run / FILE, manifest)


def go_back(run: Path, checkpoint: Checkpoint | None) -> None:
    """Cuts off the chain after the checkpoint that a run resumes from.

    Also adds that checkpoint's line if a killed process has omitted it.
    """
    logs.drop_later_lines(run / FILE, checkpoint.step - 1 if checkpoint else -1)
    if checkpoint:
        append(run, checkpoint.step)


def find_breaks(run: Path, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message on each file or setting that contradicts a run's manifests."""
    links, now = read(run), {**options.defaults(fields.ALL), **recorded}
    known = {name: _digests(run / name) for name in _GROWING}
    # Earlier checkpoints were written by a version without chains.
    begun = min((step for step in links if ENTRY in links[step]), default=math.inf)
    if (count := len(logs.read_lines(run / FILE))) != len(links):
        yield f"{FILE}: only {len(links)} of {count} lines are valid manifests"
    for step, link in links.items():
        for name, then in link.get(ENTRY, {}).items():
            if name in known and str(then) not in known[name]:
                yield f"checkpoint of step {step}: earlier lines of {name} have changed"
            if name not in (*known, _CODE) and now.get(name, then) != then:
                yield f"{layout.CONFIG}: {name} is {now[name]!r}, but was {then!r}"
    directory = run / layout.CHECKPOINTS
    for step in checkpoints.steps(directory):
        try:
            manifest = checkpoints.verify(directory, step).manifest
        except checkpoints.DamagedError as error:
            yield f"checkpoint of step {step}: {error}"
            continue
        if step not in links and (ENTRY in manifest or step > begun):
            yield f"checkpoint of step {step}: {FILE} has no line for it"
        elif links.get(step, manifest) != manifest:
            yield f"checkpoint of step {step}: its manifest differs from {FILE}"


def _digests(path: Path) -> set[str]:
    """Returns the SHA-256 of the first 0, 1, 2, ... lines of a log."""
    content, digest = b"", hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        content = files.read(path, logs.LARGEST_LOG)
    found = {digest.hexdigest()}
    for line in content.splitlines(keepends=True):
        digest.update(line)
        found.add(digest.hexdigest())
    return found
