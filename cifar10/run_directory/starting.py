"""Starts a new run in a directory, or resumes the run that the directory holds.

With --fresh, the earlier run is moved aside, not deleted. A run can be resumed if all
settings that determine the result are unchanged; `find_differences` compares them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, options, run_config
from cifar10.process import files
from cifar10.run_directory.lock import RunLock, explaining_errors, holds_run

# Folders that a training run writes to.
_FOLDERS = (layout.CHECKPOINTS, layout.TRAIN_EVENTS, layout.DEBUG_CHECKPOINTS)
_ABSENT = "not recorded"


def find_run(path: Path) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None if there is none."""
    with explaining_errors(path):
        if not holds_run(path):
            return None
        return run_config.read_run_config(path, complete=False)


def find_differences(
    path: Path, recorded: Mapping[str, Any], determining: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Finds the settings that resuming a recorded run would change: (old, new) by name.

    Only `determining` settings are compared; the run can be resumed if none differs. A
    setting that an older run did not record counts as the default. A run with links in
    place of its folders is refused.
    """
    for name in _FOLDERS:
        layout.refuse_link(path / name)
    before = {**options.defaults(fields.ALL), **recorded}
    return {
        name: (before.get(name, _ABSENT), value)
        for name, value in determining.items()
        if before.get(name) != value
    }


def start_run(
    path: Path,
    settings: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    lock: RunLock,
    *,
    fresh: bool,
) -> str | None:
    """Starts a new run or resumes the `recorded` one, and writes `config.json`.

    If `fresh`, moves the directory of the `recorded` run aside, and creates and
    locks a new one. Returns messages for the user.
    """
    note = ""
    with explaining_errors(path):
        if recorded is not None and fresh:
            aside = unused_sibling(path)
            lock.move_aside(aside)
            note = f"The earlier run was moved to {aside}."
        elif recorded is not None:
            note = version_note(recorded, settings)
            settings = _with_history(settings, recorded)
        content = (json.dumps(settings, indent=2) + "\n").encode()
        # Marked first, because a follower may read the file as soon as it exists.
        unmarked = run_config.mark_as_own(content)
        files.write_atomically(path / layout.CONFIG, content)
    return "\n".join(filter(None, (note, unmarked))) or None


def unused_sibling(path: Path) -> Path:
    """Returns an unused path beside the directory of a run, such as `run.1`."""
    return files.unused(path.with_name(f"{path.name}."))


def _with_history(
    settings: Mapping[str, Any], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `settings` plus the history of the run: earlier devices and versions."""
    kept = ("devices", "versions")
    before = {name: recorded.get(name) for name in kept}
    sessions = list(recorded.get("earlier_sessions", []))
    if before != {name: settings.get(name) for name in kept}:
        sessions.append(before)
    merged = {**settings, "earlier_sessions": sessions} if sessions else dict(settings)
    if recorded.get("simulated"):
        merged["simulated"] = True
    return merged


def version_note(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns a line on versions changed since a run was recorded; empty if none.

    This package's version counts as changed if the run has not recorded it.
    """
    now = settings.get("versions", {})
    before = {"cifar10": "of unknown version", **recorded.get("versions", {})}
    changed = [
        f"{name} {before[name]}, now {now[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    return f"Code:   was {'; '.join(changed)}" if changed else ""
