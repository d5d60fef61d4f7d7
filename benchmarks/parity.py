"""Whether rivals train the same network: same loss and gradients on the same batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.rivals import common

# Bounds on the relative difference of the loss and, in norm, of each gradient.
# In float32 all rivals are within 3e-6 of each other.
FLOAT32_BOUND = 1e-4
# With the 8 bits of bfloat16 neighbours often tie for the largest in a pool, and the
# gradient goes to another of them: ours and PyTorch's both differ by 0.16 in the first
# filters and by less everywhere else, while the loss differs by 1e-5.
HALF_LOSS_BOUND = 1e-3
HALF_GRADIENT_BOUND = 0.3


@dataclasses.dataclass(frozen=True)
class Reference:
    """What our own tower computes in float32, and from what.

    Attributes:
        values: Initial values of the variables by name.
        images: float32 [batch, 24, 24, 3].
        labels: int32 [batch].
        loss: The total loss.
        gradients: By the variables' names.
    """

    values: dict[str, np.ndarray]
    images: np.ndarray
    labels: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far a rival is from the reference.

    Attributes:
        loss: Relative difference of the losses.
        gradient: Largest relative difference, in norm, of a gradient.
        variable: Whose gradient that is.
    """

    loss: float
    gradient: float
    variable: str


def reference(ask: Callable[..., Any], batch_size: int) -> Reference:
    """Makes the reference with one of our towers.

    Args:
        ask: Calls a method of `rivals.towers.Towers` by name.
        batch_size: Images in the batch.
    """
    values = ask("initial_values")
    images, labels = common.constant_batch(batch_size, seed=1)
    loss, gradients = ask("check", values, images, labels)
    return Reference(values, images, labels, loss, gradients)


def compare(
    ours: Reference, loss: float, gradients: Mapping[str, np.ndarray]
) -> Agreement:
    """Measures how far a rival's loss and gradients are from ours.

    Args:
        ours: The reference.
        loss: The rival's loss.
        gradients: The rival's gradients by name.
    """
    if gradients.keys() != ours.gradients.keys():
        odd = min(gradients.keys() ^ ours.gradients.keys())
        return Agreement(abs(loss / ours.loss - 1), float("inf"), odd)
    distances = {
        name: _distance(gradients[name], gradient)
        for name, gradient in ours.gradients.items()
    }
    # Not a number is further than any number.
    worst = max(distances, key=lambda name: np.nan_to_num(distances[name], nan=np.inf))
    return Agreement(abs(loss / ours.loss - 1), distances[worst], worst)


def complaint(agreement: Agreement, precision: str) -> str:
    """Returns why this is not the same network, nothing if it is.

    Args:
        agreement: What `compare` found.
        precision: The type that the rival computes in.
    """
    loss_bound, gradient_bound = bounds(precision)
    found = "not the same network"
    # Written so that a difference that is not a number is complained of.
    if not agreement.loss <= loss_bound:
        return f"{found}: its loss differs by {agreement.loss:.1g}"
    if not agreement.gradient <= gradient_bound:
        difference = f"{agreement.gradient:.1g}"
        return f"{found}: the gradient of {agreement.variable} differs by {difference}"
    return ""


def bounds(precision: str) -> tuple[float, float]:
    """Returns the bounds on the relative difference of the loss and of a gradient."""
    if precision == "float32":
        return FLOAT32_BOUND, FLOAT32_BOUND
    return HALF_LOSS_BOUND, HALF_GRADIENT_BOUND


def _distance(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Returns the norm of the difference over the norm of ours."""
    if theirs.shape != ours.shape:
        return float("inf")
    return float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))
