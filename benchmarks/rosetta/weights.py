"""The same values in PyTorch's layout and names.

Keras and Flax keep a kernel as [..., in, out], PyTorch as [out, in, ...]. The gates of
a GRU are update, reset, new in Keras, and reset, update, new in PyTorch, whose two
biases are two tensors.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rosetta.task import Values

_GRU = {"kernel": "weight_ih_l0", "recurrent_kernel": "weight_hh_l0"}
_GRU_BIASES = ("gru.bias_ih_l0", "gru.bias_hh_l0")


def to_pytorch(values: Values) -> dict[str, np.ndarray]:
    """Returns what a PyTorch network of these values has in its `state_dict`."""
    found = {}
    for name, value in values.items():
        layer, kind = name.split("/")
        if name == "gru/bias":
            found |= zip(_GRU_BIASES, map(_swap_gates, value), strict=True)
        elif layer == "gru":
            found[f"gru.{_GRU[kind]}"] = _swap_gates(value).T
        elif kind == "kernel":
            # [height, width, in, out] to [out, in, height, width], or [in, out] turned.
            axes = (3, 2, 0, 1) if value.ndim == 4 else (1, 0)
            found[f"{layer}.weight"] = value.transpose(axes)
        else:
            theirs = {"embedding": "weight", "bias": "bias"}[kind]
            found[f"{layer}.{theirs}"] = value
    return found


def from_pytorch(state: Values) -> dict[str, np.ndarray]:
    """Returns the values in a PyTorch network's `state_dict`, in our layout."""
    found = {}
    for name, value in state.items():
        layer, kind = name.split(".")
        if layer == "gru":
            continue
        if layer == "embedding":
            found["embedding/embedding"] = value.copy()
        elif kind == "weight":
            axes = (2, 3, 1, 0) if value.ndim == 4 else (1, 0)
            found[f"{layer}/kernel"] = value.transpose(axes).copy()
        else:
            found[f"{layer}/bias"] = value.copy()
    if _GRU_BIASES[0] in state:
        biases = [_swap_gates(state[name]) for name in _GRU_BIASES]
        found["gru/bias"] = np.stack(biases)
        for kind, theirs in _GRU.items():
            found[f"gru/{kind}"] = _swap_gates(state[f"gru.{theirs}"].T)
    return found


def _swap_gates(value: np.ndarray) -> np.ndarray:
    """Exchanges the first two of three gates that lie side by side."""
    first, second, third = np.split(value, 3, axis=-1)
    return np.concatenate([second, first, third], axis=-1)
