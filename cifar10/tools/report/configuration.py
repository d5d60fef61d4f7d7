"""What ran on what: the runs' configurations beside each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cifar10.tools.report.run import Run

# What tells a run apart, by title; the rest is shown on request, and where runs differ.
_MAIN = {
    "model": "model",
    "parameters": "parameters",
    "data_description": "data",
    "distortions": "distortions",
    "devices": "devices",
    "towers": "towers",
    "precision": "precision",
    "global_batch_size": "images a step",
    "max_steps": "steps",
    "optimizer": "optimizer",
    "learning_rate": "learning rate",
    "seed": "seed",
}
# Where a run is, and what stands elsewhere on the page.
_ELSEWHERE = ("train_dir", "versions", "class_names", "earlier_sessions")
_ABSENT = "not recorded"


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting of all runs.

    Attributes:
        title: What it is called.
        values: One a run, as text.
        differs: Whether they are not all the same.
    """

    title: str
    values: list[str]
    differs: bool


def compare(runs: Sequence[Run]) -> tuple[list[Row], list[Row]]:
    """Compares configurations.

    Returns:
        The rows to show, which are what matters most, all that differs, and the
        versions; and the rest.
    """
    settings = [run.settings for run in runs]
    names = list(dict.fromkeys(name for own in settings for name in own))
    others = [_row(n, n, settings) for n in names if n not in (*_MAIN, *_ELSEWHERE)]
    main = [_row(name, title, settings) for name, title in _MAIN.items()]
    versions = [_versions(own) for own in settings]
    packages = dict.fromkeys(package for own in versions for package in own)
    return (
        main
        + [row for row in others if row.differs]
        + [_row(package, package, versions) for package in packages],
        [row for row in others if not row.differs],
    )


def _row(name: str, title: str, settings: Sequence[dict[str, Any]]) -> Row:
    values = [own.get(name, _ABSENT) for own in settings]
    differs = any(value != values[0] for value in values)
    return Row(title, [_text(value) for value in values], differs)


def _versions(settings: dict[str, Any]) -> dict[str, Any]:
    versions = settings.get("versions")
    return versions if isinstance(versions, dict) else {}


def _text(value: Any) -> str:
    """Returns a value as a reader expects it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return str(value).removesuffix(".0")  # All digits that tell it from others.
    return str(value)
