"""Tables of measurements, and the flags for them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.parity import describe_checks
from benchmarks.runner import Result
from cifar10.errors import UsageError

NO_FIGURE = "-"


class HelpFormatter(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    """Keeps the lines of a description and shows the flags' defaults."""


def build_parser(
    name: str, description: str | None, *, has_rows: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all have, `--only` where there are rows."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--data_dir", help="folder of the real CIFAR-10; else CIFAR10_DATA_DIR")
    if has_rows:
        said = "rows with a part of these names; a wrong one lists all"
        add("--only", nargs="+", default=[], metavar="NAME", help=said)
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


def describe_conditions(about: Mapping[str, Any], *more: str) -> str:
    """Returns lines on what a measurement used; `about` is from `machine.describe`."""
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
