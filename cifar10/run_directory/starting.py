"""Starts a new run in a directory, or resumes the run that the directory holds.

With --fresh, the earlier run is moved aside, not deleted. A run can be resumed if all
settings that determine the result are unchanged; `find_differences` compares them.
"""

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.config import layout, run_config
from cifar10.config.run_config import RecordedRun
from cifar10.config.schema import START
from cifar10.errors import UsageError
from cifar10.run_directory import logs
from cifar10.run_directory.lock import RunLock, explaining_errors, holds_run

FINGERPRINT = "data_fingerprint"
# Settings that a resumed run may change; with them, rounding may change.
OF_MACHINE = ("versions", "devices", "workers", "towers", "accumulate")


def find_run(path: Path) -> RecordedRun | None:
    """Returns the run in a directory; None if there is none."""
    with explaining_errors(path):
        return RecordedRun.read(path) if holds_run(path) else None


def find_differences(run: RecordedRun, settings: Mapping[str, Any]) -> dict[str, tuple]:
    """Finds the settings that resuming a recorded run would change: (old, new) by name.

    Only these `settings` are compared; the run can be resumed if none differs. A
    setting that an older run did not record counts as the default, and an unrecorded
    fingerprint as equal. Refuses links in place of folders, and runs from `whatif`.
    """
    for name in layout.FOLDERS:
        layout.refuse_link(run.directory / name)
    if run.facts.what_if:
        raise UsageError(
            f"{run.directory} was not trained, but computed from another run. To check "
            f"it:\n    python -m cifar10 whatif {run.directory}\nTo train from its "
            f"weights, give another --train_dir, and --initial_weights {run.directory}."
        )
    before = run.values
    return {
        name: (before[name], value)
        for name, value in settings.items()
        if before[name] != value and (name != FINGERPRINT or before[name])
    }


def record_start(run: RecordedRun, step: int) -> None:
    """Adds a line to the run's history: the step it continues from, where and how."""
    start = {"devices": run.facts.devices, "versions": run.facts.versions}
    now = {"step": step, "time": time.time(), "machine": platform.node()}
    with explaining_errors(run.directory):
        logs.append_line(run.directory / layout.STARTS, {**now, **start})


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Returns the run's history; empty if an earlier version wrote the run."""
    return run_config.inert(logs.intact(logs.read_lines(path / layout.STARTS), START))


def start_run(
    run: RecordedRun, earlier: RecordedRun | None, lock: RunLock, *, fresh: bool
) -> str | None:
    """Starts a new run or resumes the `earlier` one, and writes `config.json`.

    If `fresh`, moves the directory of the `earlier` run aside, and creates and locks a
    new one. Returns messages for the user.
    """
    note, path = "", run.directory
    with explaining_errors(path):
        if earlier is not None and fresh:
            aside = files.unused(path.with_name(f"{path.name}."))
            lock.move_aside(aside)
            note = f"The earlier run was moved to {aside}."
        elif earlier is not None:
            was, now = earlier.facts.versions, run.facts.versions
            if others := [f"{n} {old}" for n, old in was.items() if now.get(n) != old]:
                note = f"Note: earlier, this run used {', '.join(others)}."
            simulated = run.facts.simulated or earlier.facts.simulated
            run = RecordedRun.of(path, {**run.entries, "simulated": simulated})
        unmarked = run.write()
    return "\n".join(filter(None, (note, unmarked))) or None
