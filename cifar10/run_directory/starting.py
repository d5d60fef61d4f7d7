"""Starts a new run in a directory, or resumes the run that the directory holds.

With --fresh, the earlier run is moved aside, not deleted. A run can be resumed if all
settings that determine the result are unchanged; `find_differences` compares them.
"""

import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, options, run_config
from cifar10.config.schema import START, wrong
from cifar10.process import files
from cifar10.run_directory import logs
from cifar10.run_directory.lock import RunLock, explaining_errors, holds_run

# Folders that a training run writes to.
_FOLDERS = (layout.CHECKPOINTS, layout.TRAIN_EVENTS, layout.DEBUG_CHECKPOINTS)
_ABSENT = "not recorded"
# Settings that a resumed run may change; with them, rounding may change.
OF_MACHINE = ("versions", "devices", "workers", "towers")


def find_run(path: Path) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None if there is none."""
    with explaining_errors(path):
        return run_config.read_run_config(path) if holds_run(path) else None


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


def record_start(path: Path, step: int, settings: Mapping[str, Any]) -> None:
    """Adds a line to the run's history: from which step it goes on, where and how."""
    start = {name: settings[name] for name in ("devices", "versions")}
    now = {"step": step, "time": time.time(), "machine": platform.node()}
    with explaining_errors(path):
        logs.append_line(path / layout.STARTS, {**now, **start})


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Returns the run's history; empty if an earlier version wrote the run."""
    lines = logs.read_lines(path / layout.STARTS)
    intact = [one for one in lines if not wrong(one, START, needs_all=True)]
    return run_config.inert(intact)


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
            aside = files.unused(path.with_name(f"{path.name}."))
            lock.move_aside(aside)
            note = f"The earlier run was moved to {aside}."
        elif recorded is not None:
            was, now = recorded.get("versions", {}), settings.get("versions", {})
            others = [f"{name} {of}" for name, of in was.items() if now.get(name) != of]
            note = f"NOTE: the versions were {', '.join(others)}." if others else ""
            simulated = settings["simulated"] or recorded["simulated"]
            settings = {**settings, "simulated": simulated}
        content = (json.dumps(settings, indent=2) + "\n").encode()
        # Marked first, because a follower may read the file as soon as it exists.
        unmarked = run_config.mark_as_own(content)
        files.write_atomically(path / layout.CONFIG, content)
    return "\n".join(filter(None, (note, unmarked))) or None
