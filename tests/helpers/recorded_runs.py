"""Runs as a `config.json` records them, without the file."""

from pathlib import Path
from typing import Any

from cifar10.config.run_config import RecordedRun


def recorded(directory: Path | str = "run", **entries: Any) -> RecordedRun:
    """Returns a run with these entries, and defaults in place of others."""
    return RecordedRun.of(
        Path(directory), {"parameters": 1, "simulated": False, **entries}
    )
