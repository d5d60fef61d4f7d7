"""What is trained: the two networks with their rules, values and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np

BATCH_SIZE = 64
# Inputs at a time where nothing is trained; it divides both test sets.
PREDICTED_AT_ONCE = 250

Values: TypeAlias = Mapping[str, np.ndarray]
# Images, float32 [batch, 32, 32, 3] from 0 to 1, or numbers of words, int32
# [batch, 150]; and labels, int32 [batch].
Batch: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and the rule it is trained by.

    Attributes:
        network: "cnn" or "gru".
        optimizer: "sgd", with momentum, or "adam", with its usual betas.
        learning_rate: Of every step.
        momentum: Of "sgd": the velocity is `momentum * velocity + gradient`, and
            `learning_rate * velocity` is subtracted.
        epsilon: Of "adam".
        dropout: Rates after the first pool, the second one and the first dense layer.
    """

    network: Literal["cnn", "gru"]
    optimizer: Literal["sgd", "adam"]
    learning_rate: float
    momentum: float = 0.9
    epsilon: float = 1e-8
    dropout: tuple[float, float, float] = (0.25, 0.25, 0.5)


TASKS = {
    "cnn": Task("cnn", "sgd", 0.01),
    "gru": Task("gru", "adam", 0.001, dropout=(0.0, 0.0, 0.0)),
}
CLASSES = {"cnn": 10, "gru": 2}

SHAPES = {
    "cnn": {
        "conv1/kernel": (3, 3, 3, 50),
        "conv1/bias": (50,),
        "conv2/kernel": (3, 3, 50, 50),
        "conv2/bias": (50,),
        "conv3/kernel": (3, 3, 50, 100),
        "conv3/bias": (100,),
        "conv4/kernel": (3, 3, 100, 100),
        "conv4/bias": (100,),
        "dense1/kernel": (8 * 8 * 100, 512),
        "dense1/bias": (512,),
        "dense2/kernel": (512, 10),
        "dense2/bias": (10,),
    },
    # The three gates side by side: update, reset, new. One bias for the input, one for
    # the state, as in cuDNN and PyTorch.
    "gru": {
        "embedding/embedding": (30_000, 125),
        "gru/kernel": (125, 300),
        "gru/recurrent_kernel": (100, 300),
        "gru/bias": (2, 300),
        "dense/kernel": (100, 2),
        "dense/bias": (2,),
    },
}
_UNTIED_IMAGES = 2
_EMBEDDING_LIMIT = 0.05  # Keras's default for embeddings.


def initial_values(network: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws the initial values that all frameworks get.

    Kernels are uniform after Glorot, biases zero.

    Args:
        network: "cnn" or "gru".
        seed: The same seed draws the same values.

    Returns:
        float32 values by name, in the order of the layers.
    """
    random = np.random.default_rng((seed, 0))
    values = {}
    for name, shape in SHAPES[network].items():
        window = int(np.prod(shape[:-2]))
        limit = (6.0 / (window * sum(shape[-2:]))) ** 0.5
        if name.startswith("embedding"):
            limit = _EMBEDDING_LIMIT
        elif name.endswith("bias"):
            limit = 0.0
        values[name] = random.uniform(-limit, limit, shape).astype(np.float32)
    return values


def in_parts(inputs: np.ndarray) -> list[np.ndarray]:
    """Returns inputs in parts of equal size that fit in memory."""
    return np.array_split(inputs, -(-len(inputs) // PREDICTED_AT_ONCE))


def batches(
    inputs: np.ndarray,
    labels: np.ndarray,
    *,
    epoch: int,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    steps: int = 0,
) -> Iterator[Batch]:
    """Shuffles a training set and yields its whole batches, the same for everyone.

    Args:
        inputs: [count, ...].
        labels: int32 [count].
        epoch: Number of the epoch, which like the seed decides the order.
        seed: Number of the run.
        batch_size: Examples in a batch.
        steps: Batches at most; 0 for all.
    """
    order = np.random.default_rng((seed, 1, epoch)).permutation(len(inputs))
    whole = len(inputs) // batch_size
    for step in range(min(steps, whole) if steps else whole):
        # Ascending within a batch: memory is read in its order.
        chosen = np.sort(order[step * batch_size : (step + 1) * batch_size])
        yield inputs[chosen], labels[chosen]


def untied_batches() -> list[Batch]:
    """Makes two small batches whose gradients rounding does not sway.

    Where two values compete for the largest in a pool, or one lies at the edge of a
    ReLU, within float32's rounding, the gradient goes another way in one framework than
    in the next, and that of the convolutions differs by 1e-3 without anyone's fault. In
    the even areas of photographs that is the rule. With the initial values of seed 0,
    the closest decisions are 2e-5 and 1e-5 of a layer's deviation away here: the
    clearest of twenty such draws.
    """
    random = np.random.default_rng(1)
    drawn = random.random((4, _UNTIED_IMAGES, 32, 32, 3), np.float32)
    labels = np.arange(_UNTIED_IMAGES, dtype=np.int32)
    return [(images, labels) for images in (drawn[0], drawn[3])]
