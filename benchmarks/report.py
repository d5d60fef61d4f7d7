"""Tables, JSON and pictures of measurements, and the flags for them."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity import describe_checks
from benchmarks.runner import Result
from cifar10.errors import UsageError, reason

NO_FIGURE = "-"


class HelpFormatter(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    """Keeps the lines of a description and shows the flags' defaults."""


def build_parser(
    name: str, description: str | None, output_dir: Path | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all comparisons have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--data_dir", help="folder of the real CIFAR-10; else CIFAR10_DATA_DIR")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="rows with a part of these names; a wrong one lists all",
    )
    add(
        "--output_dir",
        type=Path,
        default=output_dir,
        help="folder for results.md, results.json and the pictures",
    )
    return parser


def check_at_least(least: int, flags: argparse.Namespace, *names: str) -> None:
    """Refuses numbers that are too small.

    Raises:
        UsageError: A flag that was given is below `least`.
    """
    for name in names:
        value = getattr(flags, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < least:
                raise UsageError(f"--{name} {number}: it is at least {least}.")


def check_output(folder: Path | None) -> None:
    """Makes the folder, before a long measurement is lost for want of it.

    Raises:
        UsageError: Nothing can be written there.
    """
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise _refused(folder, error) from error


def write_results(
    folder: Path | None, text: str, about: Mapping[str, Any], rows: Sequence[Any]
) -> None:
    """Writes `results.md` and `results.json`; nothing without a folder.

    Args:
        folder: Where to.
        text: The report.
        about: The conditions of the measurement.
        rows: `Result`s, or objects that are JSON already.

    Raises:
        UsageError: A file cannot be written.
    """
    if not folder:
        return
    made = [_as_dictionary(row) if isinstance(row, Result) else row for row in rows]
    values = {**about, "rows": made}
    for name, content in (
        ("results.json", json.dumps(values, indent=2, allow_nan=False, default=str)),
        ("results.md", text),
    ):
        # At one go: a full disk leaves what was there.
        part = folder / f"{name}.part"
        try:
            part.write_text(content + "\n", "utf-8")
            part.replace(folder / name)
        except OSError as error:
            raise _refused(folder, error) from error


def _refused(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{folder} cannot be written: {reason(error)}. Make room, or name another "
        "folder with --output_dir."
    )


def _as_dictionary(result: Result) -> dict[str, Any]:
    return {
        "name": result.row.name,
        **result.row.details,
        "precision": result.precision,
        "problem": result.problem or None,
        # JSON has no infinity, which is the distance of other shapes.
        "checks": [
            {**one._asdict(), "value": one.value if math.isfinite(one.value) else None}
            for one in result.checks
        ],
        **result.facts,
        "rounds": result.rounds,
    }


def describe_conditions(about: Mapping[str, Any], *more: str) -> str:
    """Returns on what was measured, from what `machine.describe` returns."""
    instructions = ", ".join(about["bfloat16"])
    bfloat16 = f"native ({instructions})" if instructions else "emulated"
    gpus = ", ".join(about["accelerators"]) or "no GPU"
    versions = [f"{name} {number}" for name, number in about["versions"].items()]
    lines = [
        f"{about['date']}, commit {about['commit']}.",
        f"{about['processor']}, {about['cores']} cores, bfloat16 {bfloat16}; {gpus}.",
        f"Versions: {', '.join(versions)}.",
    ]
    return "  \n".join([*lines, *more])  # Markdown's break of a line.


def describe_agreement(results: Iterable[Result]) -> str:
    """Returns how far the measured rows are from the reference; empty if unchecked."""
    checks = [one for result in results if result.is_measured for one in result.checks]
    found = describe_checks(checks)
    return f"Compared with a reference before timing: {found}." if found else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def median_and_range(values: Sequence[float]) -> str:
    """Returns the median, with the least and the most."""
    return (
        f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
    )


def mean_and_deviation(values: Sequence[float], digits: int, unit: str = "") -> str:
    """Returns the mean, with a sample's deviation if there are several values."""
    mean = f"{statistics.mean(values):,.{digits}f}"
    if len(values) > 1:
        mean += f" ± {statistics.stdev(values):,.{digits}f}"
    return f"{mean}{unit} ({len(values)})"


def optional(value: float | None, form: str = ".2f") -> str:
    """Returns a number, or a dash if there is none."""
    return NO_FIGURE if value is None else f"{value:{form}}"
