"""NumPy: the network by hand, in float64, which all others are compared with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.rosetta.numpy_layers import convolve, convolve_back, unpool
from benchmarks.rosetta.task import Batch, Task, Values

_BETA1, _BETA2 = 0.9, 0.999


def network(values: Values, images: np.ndarray, masks: tuple) -> tuple:
    """Computes logits, and a function from their slopes to those of the values."""
    net, kept = images, {}
    for number in (1, 2, 3, 4):
        kept[number] = net
        net = convolve(net, values[f"conv{number}/kernel"])
        net = np.maximum(net + values[f"conv{number}/bias"], 0.0)
        kept[f"relu{number}"] = net
        if number in (2, 4):
            batch, height, width, channels = net.shape
            blocks = net.reshape(batch, height // 2, 2, width // 2, 2, channels)
            net = blocks.max((2, 4)) * masks[number // 2 - 1]
    flat = net.reshape(len(net), -1)
    hidden = np.maximum(flat @ values["dense1/kernel"] + values["dense1/bias"], 0.0)
    dropped = hidden * masks[2]
    logits = dropped @ values["dense2/kernel"] + values["dense2/bias"]

    def back(slope: np.ndarray) -> dict[str, np.ndarray]:
        found = {"dense2/kernel": dropped.T @ slope, "dense2/bias": slope.sum(0)}
        slope = (slope @ values["dense2/kernel"].T) * masks[2] * (hidden > 0)
        found |= {"dense1/kernel": flat.T @ slope, "dense1/bias": slope.sum(0)}
        slope = (slope @ values["dense1/kernel"].T).reshape(net.shape)
        for number in (4, 3, 2, 1):
            after = kept[f"relu{number}"]
            if number in (2, 4):
                slope = unpool(after, slope * masks[number // 2 - 1])
            slope = slope * (after > 0)
            found[f"conv{number}/bias"] = slope.sum((0, 1, 2))
            slope, found[f"conv{number}/kernel"] = convolve_back(
                kept[number], values[f"conv{number}/kernel"], slope
            )
        return found

    return logits, back


class Model:
    """A network with its loss and its optimizer."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.random = np.random.default_rng(0)
        # Where dropout makes noise of a tenth, digits cost time and tell nothing.
        self.dtype = np.float32 if any(task.dropout) else np.float64
        self.variables: dict[str, np.ndarray] = {}

    def load(self, values: Values) -> None:
        """Begins anew from these values."""
        self.variables = {name: one.astype(self.dtype) for name, one in values.items()}
        self.first = {name: np.zeros_like(one) for name, one in self.variables.items()}
        self.second = {name: np.zeros_like(one) for name, one in self.variables.items()}
        self.steps = 0

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of now."""
        return {name: one.copy() for name, one in self.variables.items()}

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        losses = []
        for inputs, labels in batches:
            logits, back = self.logits(inputs, self.task.dropout)
            exponentials = np.exp(logits - logits.max(1, keepdims=True))
            chances = exponentials / exponentials.sum(1, keepdims=True)
            losses.append(-np.log(chances[np.arange(len(labels)), labels]).mean())
            slope = chances - np.eye(chances.shape[1], dtype=self.dtype)[labels]
            self.update(back(slope / len(labels)))
        return float(np.mean(losses))

    def update(self, gradients: Values) -> None:
        """Applies the optimizer's rule to every variable."""
        self.steps += 1
        for name, gradient in gradients.items():
            variable = self.variables[name]
            first, second = self.first[name], self.second[name]
            if self.task.optimizer == "sgd":
                first[...] = self.task.momentum * first + gradient
                variable[...] -= self.task.learning_rate * first
                continue
            first[...] = _BETA1 * first + (1 - _BETA1) * gradient
            second[...] = _BETA2 * second + (1 - _BETA2) * gradient**2
            mean = first / (1 - _BETA1**self.steps)
            size = np.sqrt(second / (1 - _BETA2**self.steps))
            variable[...] -= self.task.learning_rate * mean / (size + self.task.epsilon)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Computes logits, without dropout."""
        return self.logits(inputs, (0.0, 0.0, 0.0))[0]

    def logits(self, inputs: np.ndarray, rates: tuple) -> tuple:
        """Computes logits, and the function from their slopes to the values'."""
        shapes = ((16, 16, 50), (8, 8, 100), (512,))
        masks = [
            self._mask(r, s, len(inputs)) for r, s in zip(rates, shapes, strict=True)
        ]
        return network(self.variables, inputs.astype(self.dtype), tuple(masks))

    def _mask(self, rate: float, shape: tuple, count: int) -> np.ndarray:
        """Keeps what is left at its mean, so that testing needs no factor."""
        if not rate:
            return np.ones((), self.dtype)
        kept = self.random.random((count, *shape), np.float32) >= rate
        return kept / self.dtype(1.0 - rate)
