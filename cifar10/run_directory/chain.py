"""The chain of a run's checkpoint manifests, which reveals later changes to the run.

Whoever changes what a manifest records has to rewrite all later manifests too, which
then differ from copies made before.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, logs, starting

LINK = "chain"  # The key of a link in a manifest.


def make_link(run: Path, step: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the link for the manifest of a step's checkpoint.

    It holds the step and the SHA-256 of the manifest before, the SHA-256 of the log up
    to `step`, and the `settings` that determine the result, with the code's versions.
    """
    directory = run / layout.CHECKPOINTS
    before = max((at for at in checkpoints.steps(directory) if at < step), default=None)
    link: dict[str, Any] = {"settings": {**settings}, "step": before}
    with contextlib.suppress(OSError, UsageError):  # Saving must not fail.
        log = logs.lines_up_to(run / layout.METRICS, step)
        link["log"] = hashlib.sha256(log).hexdigest()
        if before is not None:
            manifest = checkpoints.read_manifest(directory, before)
            link["manifest"] = checkpoints.digest_of(manifest)
    return link


def check(run: Path, recorded: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Compares a run's manifests with each other, its log and its `config.json`.

    Returns the number of linked checkpoints, and a message on each contradiction.
    """
    directory, linked, breaks = run / layout.CHECKPOINTS, 0, []
    saved = checkpoints.steps(directory)
    for step in saved:
        where = f"checkpoint of step {step}"
        try:
            link = checkpoints.verify(directory, step).manifest.get(LINK)
        except checkpoints.DamagedError as error:
            breaks.append(f"{where}: {error}")
            continue
        if not isinstance(link, dict) or not isinstance(link.get("settings"), dict):
            continue  # An earlier version wrote the manifest.
        linked += 1
        now = make_link(run, step, {})
        is_deleted = link.get("step") not in (None, *saved)  # The one before.
        breaks += [
            f"{where}: the {name} before it has changed"
            for name in (["log"] if is_deleted else ["log", "step", "manifest"])
            if link.get(name) != now.get(name)
        ]
        changed = starting.find_differences(run, recorded, link["settings"])
        breaks += [
            f"{layout.CONFIG}: {name} is {now!r}, but was {then!r} at step {step}"
            for name, (now, then) in changed.items()
            if name != "versions"
        ]
    return linked, breaks
