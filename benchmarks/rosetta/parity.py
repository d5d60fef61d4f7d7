"""Whether rows train the same network by the same rule.

Everything is seen from outside, through the functions that are timed: a model loads
values, trains, predicts. With dropout off and gradient descent at an enormous rate,
the variables after one step are the gradients; two steps of the real rule show its
momentum. With dropout on, training has to raise the loss as much as the reference's
does, with one layer's alone the loss has to vary as much, and predictions have to
repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rosetta.task import Batch, Task, Values

# Of the loss, of logits and of each gradient, in norm, relative to the reference's.
BOUND = 1e-4
# Of what two steps change in each variable. Sums of small numbers to large ones round,
# up to 5e-5 here, and Adam's epsilon (below) makes up to 2e-3; a wrong form of
# momentum makes a third or more.
UPDATE_BOUND = 0.01
# What dropout adds to the loss, in parts of what it adds to the reference's: the mean
# of 8 draws of 16 images of noise has a standard deviation of a tenth, and the bounds
# are over six of them away. Kept and dropped parts mixed up would add 6.5 times it.
RISE_BOUNDS = (0.4, 2.5)

# The loss's standard deviation with one layer's dropout alone, in parts of the
# reference's: each is uncertain by an eighth after so many draws.
SPREAD_BOUNDS = (0.4, 2.5)

_DRAWS = 8
_DRAWS_OF_A_LAYER = 32
# Few, because all layers of all rows are looked at, and more do not make the standard
# deviation any surer; even, for two towers.
_EXAMPLES_OF_A_LAYER = 4
# So large that a variable after one update is the gradient to float32's precision, and
# a power of two, so that multiplying by it does not round.
_GRADIENT_RATE = 2.0**40
# The last kernel is multiplied by this to make dropout tell in the loss: a draw's
# standard deviation is 0.3 of what dropout adds; with 5 it is 0.65.
_LOUDER = 20.0
# Adam divides by the gradient's size plus epsilon, which Keras and TensorFlow add in
# another place than PyTorch and Optax: below this size their first steps differ.
LEAST_GRADIENT = 1e-4


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a model shows of itself.

    Attributes:
        loss: Of the first batch, without dropout.
        logits: Of its inputs.
        gradients: Of the loss of the first batch without ties, by variable.
        updates: What two steps on such batches change, by variable.
        repeats: Whether predicting twice gives the same bits.
        rises: What training mode adds to the loss, in several draws.
        spreads: Of each dropout layer alone, the standard deviation of the loss.
        begins: Whether the values after loading are the given ones, bit for bit.
    """

    loss: float
    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]
    repeats: bool
    rises: list[float]
    spreads: list[float]
    begins: bool


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far a model is from the reference.

    Attributes:
        loss: Relative difference of the losses.
        logits: Relative difference of the logits, in norm.
        gradient: Largest relative difference of a gradient, in norm, and whose it is.
        update: The same of what two steps change.
        repeats: Whether predicting twice gives the same bits.
        rise: What dropout adds to the loss over what it adds to the reference's; 1 if
            it should and does add nothing.
        spreads: The same of each dropout layer's standard deviation.
        begins: Whether it begins from the given values.
    """

    loss: float
    logits: float
    gradient: tuple[float, str]
    update: tuple[float, str]
    repeats: bool
    rise: float
    spreads: list[float]
    begins: bool


def collect(
    make: Callable[[Task], Any],
    task: Task,
    values: Values,
    first: Batch,
    untied: Sequence[Batch],
) -> Evidence:
    """Has a model show what it does.

    Args:
        make: From a task to a model of the row that is looked at.
        task: The task that is timed.
        values: Initial values.
        first: The first batch of the training.
        untied: Two batches for the gradients, which float32's rounding does not sway.
    """
    still = dataclasses.replace(task, dropout=(0.0, 0.0, 0.0))
    descent = dataclasses.replace(
        still, optimizer="sgd", learning_rate=_GRADIENT_RATE, momentum=0.0
    )
    model = make(descent)
    model.load(values)
    model.train(iter(untied[:1]))
    gradients = _differences(values, model.values(), -1.0 / _GRADIENT_RATE)
    model = make(still)
    model.load(values)
    loaded = model.values()
    begins = all(np.array_equal(loaded[name], one) for name, one in values.items())
    model.train(iter(untied))
    updates = _differences(values, model.values(), 1.0)
    model.load(values)
    logits = model.predict(first[0])
    loss = model.train(iter([first]))
    louder = _louder(values)
    if any(task.dropout):
        model = make(task)
    repeats, rises = _dropout(model, louder, first, task)
    spreads = [
        _spread(make(dataclasses.replace(task, dropout=alone)), louder, first)
        for alone in _alone(task.dropout)
    ]
    return Evidence(loss, logits, gradients, updates, repeats, rises, spreads, begins)


def _louder(values: Values) -> Values:
    """Returns values with which dropout tells in the loss."""
    last = list(values)[-2]
    return {**values, last: values[last] * np.float32(_LOUDER)}


def _alone(rates: tuple[float, float, float]) -> list[tuple[float, float, float]]:
    """Returns the rates of each dropout layer with the other ones off."""
    first, second, third = rates
    each = [(first, 0.0, 0.0), (0.0, second, 0.0), (0.0, 0.0, third)]
    return [one for one in each if any(one)]


def _spread(model: Any, values: Values, batch: Batch) -> float:
    """Returns the standard deviation of the loss in training mode."""
    few = tuple(part[:_EXAMPLES_OF_A_LAYER] for part in batch)
    losses = []
    for _ in range(_DRAWS_OF_A_LAYER):
        model.load(values)
        losses.append(model.train(iter([few])))
    return float(np.std(losses))


def _dropout(
    model: Any, values: Values, batch: Batch, task: Task
) -> tuple[bool, list[float]]:
    """Returns whether predictions repeat, and what training mode adds to the loss."""
    model.load(values)
    inputs, labels = batch
    logits = model.predict(inputs)
    repeats = np.array_equal(logits, model.predict(inputs))
    exact = logits.astype(np.float64)
    chances = np.exp(exact - exact.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    evaluated = -np.log(chances[np.arange(len(labels)), labels]).mean()
    rises = []
    for _ in range(_DRAWS if any(task.dropout) else 1):
        model.load(values)
        rises.append(float(model.train(iter([batch])) - evaluated))
    return repeats, rises


def compare(reference: Evidence, found: Evidence, task: Task) -> Agreement:
    """Measures how far a model is from the reference.

    Args:
        reference: What the model in NumPy shows.
        found: What this one shows.
        task: The task that is timed.
    """
    counted = {
        # At most a few percent of an embedding: most words are in no batch.
        name: np.abs(gradient) > (LEAST_GRADIENT if task.optimizer == "adam" else -1.0)
        for name, gradient in reference.gradients.items()
    }
    return Agreement(
        abs(found.loss / reference.loss - 1),
        _distance(found.logits, reference.logits),
        _worst(found.gradients, reference.gradients),
        _worst(
            {name: _chosen(one, counted[name]) for name, one in found.updates.items()},
            {name: one[counted[name]] for name, one in reference.updates.items()},
        ),
        found.repeats,
        _ratio(np.mean(found.rises), np.mean(reference.rises)),
        [
            _ratio(one, other)
            for one, other in zip(found.spreads, reference.spreads, strict=True)
        ],
        found.begins,
    )


def complaint(agreement: Agreement) -> str:
    """Returns why this is not the same network, nothing if it is."""
    gradient, of_gradient = agreement.gradient
    update, of_update = agreement.update
    least, most = RISE_BOUNDS
    # Written so that a difference that is not a number is complained of.
    faults = {
        "it does not begin from the given values": agreement.begins,
        "predicting twice gives different logits (is dropout on?)": agreement.repeats,
        f"its logits differ by {agreement.logits:.1g}": agreement.logits <= BOUND,
        f"its loss differs by {agreement.loss:.1g}": agreement.loss <= BOUND,
        f"the gradient of {of_gradient} differs by {gradient:.1g}": gradient <= BOUND,
        f"two steps change {of_update} by another amount, relative difference "
        f"{update:.1g} (momentum?)": update <= UPDATE_BOUND,
        f"dropout adds {agreement.rise:.2g} times what it should to the loss": least
        <= agreement.rise
        <= most,
    }
    least, most = SPREAD_BOUNDS
    faults |= {
        f"dropout layer {number} alone makes the loss vary {ratio:.2g} times as much "
        "as it should": least <= ratio <= most
        for number, ratio in enumerate(agreement.spreads, start=1)
    }
    for fault, is_fine in faults.items():
        if not is_fine:
            return f"not the same network: {fault}"
    return ""


def _differences(before: Values, after: Values, factor: float) -> dict[str, np.ndarray]:
    return {
        name: (after[name].astype(np.float64) - before[name]) * factor
        if after[name].shape == before[name].shape
        else np.full(1, np.nan)
        for name in before
    }


def _worst(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> tuple[float, str]:
    """Returns the largest distance, and of which variable."""
    distances = {name: _distance(found[name], one) for name, one in expected.items()}
    # Not a number is further than any number.
    worst = max(distances, key=lambda name: np.nan_to_num(distances[name], nan=np.inf))
    return distances[worst], worst


def _chosen(values: np.ndarray, which: np.ndarray) -> np.ndarray:
    return values[which] if values.shape == which.shape else values


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the norm of the difference over the norm of what is expected."""
    if found.shape != expected.shape or not expected.size:
        return float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _ratio(found: float, expected: float) -> float:
    """Returns how often one rise goes into the other; of two that are nothing, 1."""
    if abs(expected) < BOUND:
        return 1.0 if abs(found) < BOUND else float("inf")
    return float(found / expected)
