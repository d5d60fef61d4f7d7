"""NumPy: the network by hand, in float64, which all others are compared with."""

from __future__ import annotations

import numpy as np

from benchmarks.rosetta import cnn_numpy
from benchmarks.rosetta.numpy_layers import sigmoid
from benchmarks.rosetta.task import Values


def network(values: Values, words: np.ndarray) -> tuple:
    """Computes logits, and a function from their slopes to those of the values."""
    embedded = values["embedding/embedding"][words]
    of_input, of_state = values["gru/bias"]
    from_input = embedded @ values["gru/kernel"] + of_input
    recurrent = values["gru/recurrent_kernel"]
    state, kept = np.zeros((len(words), len(recurrent)), from_input.dtype), []
    for step in range(words.shape[1]):
        update_in, reset_in, new_in = np.split(from_input[:, step], 3, -1)
        own = np.split(state @ recurrent + of_state, 3, -1)
        update, reset = sigmoid(update_in + own[0]), sigmoid(reset_in + own[1])
        new = np.tanh(new_in + reset * own[2])
        kept.append((state, update, reset, new, own[2]))
        state = update * state + (1.0 - update) * new
    logits = state @ values["dense/kernel"] + values["dense/bias"]

    def back(slope: np.ndarray) -> dict[str, np.ndarray]:
        found = {"dense/kernel": state.T @ slope, "dense/bias": slope.sum(0)}
        to_state = slope @ values["dense/kernel"].T
        to_input, to_own = np.zeros_like(from_input), np.zeros_like(from_input)
        to_recurrent = np.zeros_like(recurrent)
        for step in reversed(range(words.shape[1])):
            before, update, reset, new, own_new = kept[step]
            to_new = to_state * (1.0 - update) * (1.0 - new**2)
            to_update = to_state * (before - new) * update * (1.0 - update)
            to_reset = to_new * own_new * reset * (1.0 - reset)
            to_input[:, step] = np.concatenate([to_update, to_reset, to_new], -1)
            to_own[:, step] = np.concatenate([to_update, to_reset, to_new * reset], -1)
            to_recurrent += before.T @ to_own[:, step]
            to_state = to_state * update + to_own[:, step] @ recurrent.T
        found["gru/bias"] = np.stack([to_input.sum((0, 1)), to_own.sum((0, 1))])
        found["gru/kernel"] = np.tensordot(embedded, to_input, ((0, 1), (0, 1)))
        found["gru/recurrent_kernel"] = to_recurrent
        found["embedding/embedding"] = np.zeros_like(values["embedding/embedding"])
        np.add.at(
            found["embedding/embedding"], words, to_input @ values["gru/kernel"].T
        )
        return found

    return logits, back


class Model(cnn_numpy.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    def logits(self, inputs: np.ndarray, rates: tuple) -> tuple:
        """Computes logits, and the function from their slopes to the values'."""
        del rates  # It has no dropout.
        return network(self.variables, inputs)
