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

from benchmarks.parity import Check, compare_losses, compare_variables, distance
from benchmarks.rosetta.task import Batch, Task, Values

GRADIENT = "difference of the gradient"
# Of the loss, of logits and of each gradient, in norm, relative to the reference's.
BOUND = 1e-4
# Of what two steps change in each variable. Sums of small numbers to large ones round,
# up to 5e-5 here, and Adam's epsilon (below) makes up to 2e-3; a wrong form of
# momentum makes a third or more.
UPDATE_BOUND = 0.01
# What dropout adds to the loss, in parts of what it adds to the reference's: the mean
# of 8 draws of 16 images of noise has a standard deviation of a tenth, and the bounds
# are over six of them away. Kept and dropped parts mixed up would add 6.5 times it.
# The loss's standard deviation with one layer's dropout alone, in parts of the
# reference's, is uncertain by an eighth after 32 draws.
DROPOUT_BOUNDS = {"least": 0.4, "most": 2.5}

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
_LEAST_GRADIENT = 1e-4


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a model shows of itself.

    Attributes:
        strays: How many variables differ from the given values after loading.
        unsteady: How many logits differ when predicted twice.
        loss: Of the first batch, without dropout.
        logits: Of its inputs.
        gradients: Of the loss of the first batch without ties, by variable.
        updates: What two steps on such batches change, by variable.
        rise: What training mode adds to the loss, in the mean of several draws.
        spreads: Of each dropout layer alone, the standard deviation of the loss.
    """

    strays: int
    unsteady: int
    loss: float
    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]
    rise: float
    spreads: list[float]


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
    model = make(
        dataclasses.replace(
            still, optimizer="sgd", learning_rate=_GRADIENT_RATE, momentum=0.0
        )
    )
    model.load(values)
    model.train(iter(untied[:1]))
    gradients = _differences(values, model.values(), -1.0 / _GRADIENT_RATE)
    model = make(still)
    model.load(values)
    loaded = model.values()
    strays = sum(not np.array_equal(loaded[name], one) for name, one in values.items())
    model.train(iter(untied))
    updates = _differences(values, model.values(), 1.0)
    model.load(values)
    logits = model.predict(first[0])
    loss = model.train(iter([first]))

    # A louder last kernel makes dropout tell in the loss.
    last = list(values)[-2]
    louder = {**values, last: values[last] * np.float32(_LOUDER)}
    if any(task.dropout):
        model = make(task)
    model.load(louder)
    loud = model.predict(first[0])
    unsteady = int(np.sum(loud != model.predict(first[0])))
    losses = _draw_losses(model, louder, first, _DRAWS if any(task.dropout) else 1)
    few = tuple(part[:_EXAMPLES_OF_A_LAYER] for part in first)
    spreads = []
    for layer, rate in enumerate(task.dropout):
        if rate:
            alone = tuple(rate if other == layer else 0.0 for other in range(3))
            one = make(dataclasses.replace(task, dropout=alone))
            spreads.append(
                float(np.std(_draw_losses(one, louder, few, _DRAWS_OF_A_LAYER)))
            )
    rise = float(np.mean(losses)) - _cross_entropy(loud, first[1])
    return Evidence(strays, unsteady, loss, logits, gradients, updates, rise, spreads)


def _draw_losses(model: Any, values: Values, batch: Any, draws: int) -> list[float]:
    """Returns the losses of a batch in training mode, each from the same values."""
    losses = []
    for _ in range(draws):
        model.load(values)
        losses.append(model.train(iter([batch])))
    return losses


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


def compare(reference: Evidence, found: Evidence, task: Task) -> list[Check]:
    """Measures how far a model is from the reference.

    Args:
        reference: What the reference shows.
        found: What this one shows.
        task: The task that is timed.
    """
    # At most a few percent of an embedding: most words are in no batch.
    least = _LEAST_GRADIENT if task.optimizer == "adam" else -1.0
    counted = {name: np.abs(one) > least for name, one in reference.gradients.items()}
    updates, expected = (
        {
            name: one[counted[name]] if one.shape == counted[name].shape else one
            for name, one in evidence.updates.items()
        }
        for evidence in (found, reference)
    )
    rises = "rise of the loss by dropout, over the reference's,"
    spread = "spread of the loss by dropout layer {} alone, over the reference's,"
    pairs = zip(found.spreads, reference.spreads, strict=True)
    return [
        Check("number of variables that begin from other values", found.strays, 0),
        Check("number of logits that differ in a repetition", found.unsteady, 0),
        Check(
            "difference of the logits",
            distance(found.logits, reference.logits),
            BOUND,
        ),
        compare_losses(found.loss, reference.loss, BOUND),
        compare_variables(GRADIENT, found.gradients, reference.gradients, BOUND),
        compare_variables(
            "difference of two updates (momentum?)", updates, expected, UPDATE_BOUND
        ),
        Check(rises, _ratio(found.rise, reference.rise), **DROPOUT_BOUNDS),
        *(
            Check(spread.format(layer), _ratio(one, other), **DROPOUT_BOUNDS)
            for layer, (one, other) in enumerate(pairs, start=1)
        ),
    ]


def _differences(before: Values, after: Values, factor: float) -> dict[str, np.ndarray]:
    return {
        name: (after[name].astype(np.float64) - before[name]) * factor
        if after[name].shape == before[name].shape
        else np.full(1, np.nan)
        for name in before
    }


def _ratio(found: float, expected: float) -> float:
    """Returns how often one rise goes into the other; of two that are nothing, 1."""
    if abs(expected) < BOUND:
        return 1.0 if abs(found) < BOUND else float("inf")
    return float(found / expected)
