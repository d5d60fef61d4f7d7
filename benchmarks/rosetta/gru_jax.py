"""JAX: a GRU of one's own in `lax.scan`; the rest as in `cnn_jax.py`."""

from __future__ import annotations

import jax
import optax
from flax import nnx
from jax import numpy as jnp

from benchmarks.rosetta import cnn_jax


class Gru(nnx.Module):
    """A GRU with two biases, as the others have them; `nnx.GRUCell` has one."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.zeros((125, 300)))
        self.recurrent_kernel = nnx.Param(jnp.zeros((100, 300)))
        self.bias = nnx.Param(jnp.zeros((2, 300)))

    def __call__(self, embedded: jax.Array) -> jax.Array:
        """Computes the last state."""
        recurrent, (of_input, of_state) = self.recurrent_kernel[...], self.bias[...]

        def step(state: jax.Array, gates: jax.Array) -> tuple[jax.Array, None]:
            update_in, reset_in, new_in = jnp.split(gates, 3, axis=1)
            own = jnp.split(state @ recurrent + of_state, 3, axis=1)
            update = nnx.sigmoid(update_in + own[0])
            reset = nnx.sigmoid(reset_in + own[1])
            new = jnp.tanh(new_in + reset * own[2])
            return update * state + (1.0 - update) * new, None

        # The inputs' part of all words at once, and word by word only the state's.
        gates = embedded.swapaxes(0, 1) @ self.kernel[...] + of_input
        return jax.lax.scan(step, jnp.zeros((len(embedded), 100)), gates)[0]


class Network(nnx.Module):
    """From numbers of words to logits."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(30_000, 125, rngs=rngs)
        self.gru = Gru()
        self.dense = nnx.Linear(100, 2, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        """Computes logits from the last state."""
        return self.dense(self.gru(self.embedding(words)))


class Model(cnn_jax.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    def build(self) -> nnx.Module:
        """Builds the network."""
        return Network()

    def make_optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer."""
        if self.task.optimizer == "sgd":
            return super().make_optimizer()
        return optax.adam(self.task.learning_rate, eps=self.task.epsilon)
