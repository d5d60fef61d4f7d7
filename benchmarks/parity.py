"""Whether rivals train the same network: checks of a step against a reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

# The loss, and the gradients by the names of their variables.
Step = tuple[float, Mapping[str, np.ndarray]]


class Check(NamedTuple):
    """A figure that shows whether a rival's network is the reference's."""

    what: str  # Such as "difference of the loss".
    value: float
    most: float
    least: float = 0.0
    variable: str = ""  # Whose figure this is, if it is a variable's.

    @property
    def is_met(self) -> bool:
        """Whether the figure is within its bounds; what is not a number is not."""
        return self.least <= self.value <= self.most


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the norm of the difference over the norm of the expected values."""
    if found.shape != expected.shape or not expected.size:
        return float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def compare_variables(
    what: str,
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    most: float,
) -> Check:
    """Returns the check of the variable whose values are furthest from the expected."""
    if found.keys() != expected.keys():
        odd = min(found.keys() ^ expected.keys())
        return Check(what, float("inf"), most, variable=odd)
    distances = {name: distance(found[name], one) for name, one in expected.items()}
    # Not a number is further than any number.
    worst = max(distances, key=lambda name: np.nan_to_num(distances[name], nan=np.inf))
    return Check(what, distances[worst], most, variable=worst)


def compare_losses(found: float, expected: float, most: float) -> Check:
    """Returns the check of the relative difference of two losses."""
    return Check("difference of the loss", abs(found / expected - 1), most)


def compare_steps(
    found: Step, expected: Step, loss_bound: float, gradient_bound: float
) -> list[Check]:
    """Returns the checks of a step's loss and gradients."""
    what = "difference of the gradient"
    return [
        compare_losses(found[0], expected[0], loss_bound),
        compare_variables(what, found[1], expected[1], gradient_bound),
    ]


def complaint(checks: Iterable[Check]) -> str:
    """Returns why this is not the same network, nothing if it is."""
    for check in checks:
        if not check.is_met:
            of = f" of {check.variable}" if check.variable else ""
            return (
                f"not the same network: {check.what}{of} is {check.value:.2g}, not "
                f"{check.least:g} to {check.most:g}"
            )
    return ""


def describe_checks(checks: Iterable[Check]) -> str:
    """Returns the range of each kind of figure, with its bounds."""
    values: dict[tuple[str, float, float], list[float]] = {}
    for check in checks:
        values.setdefault((check.what, check.least, check.most), []).append(check.value)
    return "; ".join(
        f"{what} {min(found):.1g} to {max(found):.1g} (bounds {least:g} to {most:g})"
        for (what, least, most), found in values.items()
    )
