"""Who takes part, and what became of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.rosetta.parity import Agreement

EXTRA = "rosetta"
# Fewer epochs than this have no standard deviation worth the name.
FEWEST_EPOCHS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train both networks.

    Attributes:
        name: For people.
        framework: The end of its modules' names, as in `cnn_keras`.
        how: How it is compiled.
        images: How images lie in memory and are convolved.
        options: Further arguments of its `Model`.
        environment: Variables that are set before it is imported.
    """

    name: str
    framework: str
    how: str
    images: str = "channels last"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def _towers(count: int) -> Row:
    name = "ours, 1 tower" if count == 1 else f"ours, {count} towers"
    environment = {"KERAS_BACKEND": "tensorflow"}
    options = {"towers": count}
    return Row(name, "towers", "tf.function", options=options, environment=environment)


# jaxlib 0.10 hands convolutions to a library that takes twice as long to train this
# network on a CPU as XLA's own (docs/lab-notes.md, 2026-11-21). How to leave it out of
# them: https://github.com/jax-ml/jax/issues/37465
_JAX: dict[str, Any] = {
    "images": "channels last, XLA's own convolutions",
    "environment": {
        "XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=-individual_convolution"
    },
}


def _keras(name: str, backend: str, how: str, **others: Any) -> Row:
    environment = {"KERAS_BACKEND": backend, **others.pop("environment", {})}
    return Row(name, "keras", how, environment=environment, **others)


ROWS = (
    _towers(1),
    _towers(2),
    Row("TensorFlow", "tensorflow", "tf.function"),
    _keras("Keras on TensorFlow", "tensorflow", "fit, tf.function"),
    _keras("Keras on JAX", "jax", "fit, jax.jit", **_JAX),
    _keras("Keras on PyTorch", "torch", "fit, eager"),
    Row("PyTorch", "pytorch", "eager, fused optimizer"),
    Row("JAX, Flax NNX, Optax", "jax", "nnx.jit", **_JAX),
)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of training.

    Attributes:
        run: Number of the run that it belongs to, from 0.
        seconds: Without the evaluation after it.
        loss: Mean over its batches.
        accuracy: On the test set after it; None where that means nothing.
        ends_run: Whether it is the run's last.
    """

    run: int
    seconds: float
    loss: float
    accuracy: float | None
    ends_run: bool


@dataclasses.dataclass
class Result:
    """What became of a row with one network.

    Attributes:
        row: The row.
        network: "cnn" or "gru".
        problem: Why it is not ranked, in one line; empty if it is.
        agreement: How far it is from the reference.
        warm_up: Seconds until its first two steps were done.
        epochs: What was measured after that.
    """

    row: Row
    network: str
    problem: str = ""
    agreement: Agreement | None = None
    warm_up: float | None = None
    epochs: list[Epoch] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """The mean of its epochs."""
        return statistics.mean(self._times) if self.epochs else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of its epochs, if there are enough of them."""
        enough = len(self.epochs) >= FEWEST_EPOCHS
        return statistics.stdev(self._times) if enough else None

    @property
    def accuracies(self) -> list[float]:
        """The accuracy at the end of each run that came to its end."""
        last = [epoch.accuracy for epoch in self.epochs if epoch.ends_run]
        return [one for one in last if one is not None]

    @property
    def _times(self) -> list[float]:
        return [epoch.seconds for epoch in self.epochs]


def ranked(results: Sequence[Result]) -> list[Result]:
    """Returns the results of one network, the fastest first, those with problems last.

    Nothing is ranked that is not the same network or did not get to its end.
    """
    return sorted(
        results, key=lambda one: (bool(one.problem), one.seconds or float("inf"))
    )
