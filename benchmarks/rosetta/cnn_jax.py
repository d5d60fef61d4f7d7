"""JAX: a module of Flax NNX, a rule of Optax, and steps that are compiled."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp

from benchmarks.rosetta.task import SHAPES, Batch, Task, Values, in_parts


class Network(nnx.Module):
    """From images to logits."""

    def __init__(self, dropout: tuple[float, float, float]) -> None:
        rngs = nnx.Rngs(0)
        self.conv1 = nnx.Conv(3, 50, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(50, 50, (3, 3), rngs=rngs)
        self.conv3 = nnx.Conv(50, 100, (3, 3), rngs=rngs)
        self.conv4 = nnx.Conv(100, 100, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(8 * 8 * 100, 512, rngs=rngs)
        self.dense2 = nnx.Linear(512, 10, rngs=rngs)
        self.dropout1, self.dropout2, self.dropout3 = (
            nnx.Dropout(rate, rngs=rngs) for rate in dropout
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Computes logits; `train()` and `eval()` switch dropout on and off."""
        net = nnx.relu(self.conv1(images))
        net = nnx.relu(self.conv2(net))
        net = self.dropout1(_max_pool(net))
        net = nnx.relu(self.conv3(net))
        net = nnx.relu(self.conv4(net))
        net = self.dropout2(_max_pool(net))
        net = nnx.relu(self.dense1(net.reshape(len(net), -1)))
        return self.dense2(self.dropout3(net))


class Model:
    """A network with its loss and its optimizer."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.network = self.build()
        self.rule = self.make_optimizer()  # Once: each is compiled anew.
        self.step = nnx.jit(_train_step)
        self.logits = nnx.jit(lambda network, inputs: network(inputs))

    def build(self) -> nnx.Module:
        """Builds the network."""
        return Network(self.task.dropout)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer."""
        return optax.sgd(self.task.learning_rate, self.task.momentum)

    def load(self, values: Values) -> None:
        """Begins anew from these values."""
        for name, value in values.items():
            self._parameter(name)[...] = jnp.asarray(value)
        self.optimizer = nnx.Optimizer(self.network, self.rule, wrt=nnx.Param)

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of now."""
        names = SHAPES[self.task.network]
        return {name: np.array(self._parameter(name)[...]) for name in names}

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        self.network.train()
        losses = [
            self.step(self.network, self.optimizer, inputs, labels)
            for inputs, labels in batches
        ]
        return float(jnp.stack(losses).mean())

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Computes logits."""
        self.network.eval()
        logits = [self.logits(self.network, part) for part in in_parts(inputs)]
        return np.concatenate(logits)

    def _parameter(self, name: str) -> nnx.Param:
        layer, kind = name.split("/")
        return getattr(getattr(self.network, layer), kind)


def _max_pool(net: jax.Array) -> jax.Array:
    """Halves height and width.

    As `nnx.max_pool(net, (2, 2), (2, 2))`, whose gradient takes XLA several times
    as long on a CPU.
    """
    batch, height, width, channels = net.shape
    windows = net.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return windows.max((2, 4))


def _train_step(
    network: nnx.Module, optimizer: nnx.Optimizer, inputs: jax.Array, labels: jax.Array
) -> jax.Array:
    """Updates the network in place and returns the loss."""

    def loss_of(network: nnx.Module) -> jax.Array:
        logits = network(inputs)
        # Of logits: the only softmax is in here.
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(network)
    optimizer.update(network, gradients)
    return loss
