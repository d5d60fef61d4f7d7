"""The start of a run in its directory: new, resumed, or with the earlier one aside.

Nothing in the directory is deleted here. A run resumes if its configuration agrees in
everything that determines the result; `find_differences` returns where it does not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, options, run_config
from cifar10.process import files
from cifar10.run_directory.lock import RunLock, explaining_errors, holds_run

# What a training writes to in its directory.
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
    """Returns the values of a run and of a training where they differ, by name.

    Only the training's `determining` entries are compared: the run can be resumed if
    none of them differs. An entry that an older run did not record counts as its
    default. Folders that lead out of the run's directory are refused.
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
    """Starts a run, or takes over the `recorded` one, and writes `config.json`.

    With `fresh` the earlier run is moved aside, and the `lock` is then on the new
    directory. Returns messages for the user.
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
        # The note comes first: whatever follows the run reads the file at once.
        unmarked = run_config.mark_as_own(content)
        files.write_atomically(path / layout.CONFIG, content)
    return "\n".join(filter(None, (note, unmarked))) or None


def unused_sibling(path: Path) -> Path:
    """Returns a directory beside that of a run at which nothing exists: `run.1`."""
    return files.unused(path.with_name(f"{path.name}."))


def _with_history(
    settings: Mapping[str, Any], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds devices and versions of earlier sessions, and whether one was simulated."""
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
    """Returns the versions that wrote a run and that continue it, where they differ.

    A run that does not record which code wrote it does so from now on.
    """
    now = settings.get("versions", {})
    before = {"cifar10": "of unknown version", **recorded.get("versions", {})}
    changed = [
        f"{name} {before[name]}, now {now[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    return f"Code:   was {'; '.join(changed)}" if changed else ""
