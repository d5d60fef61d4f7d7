"""Plain TensorFlow: variables, operations, a tape and `tf.function`; no Keras."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from benchmarks.rosetta.task import Batch, Task, Values, in_parts


class Network:
    """From images to logits."""

    def __init__(self, dropout: tuple[float, float, float]) -> None:
        self.dropout = dropout
        self.random = tf.random.Generator.from_seed(0)

    def __call__(self, values: dict, images: tf.Tensor, *, training: bool) -> tf.Tensor:
        """Computes logits; `training` switches dropout on and off."""

        def conv(net: tf.Tensor, name: str) -> tf.Tensor:
            net = tf.nn.conv2d(net, values[f"{name}/kernel"], 1, "SAME")
            return tf.nn.relu(tf.nn.bias_add(net, values[f"{name}/bias"]))

        def dense(net: tf.Tensor, name: str) -> tf.Tensor:
            return tf.matmul(net, values[f"{name}/kernel"]) + values[f"{name}/bias"]

        def drop(net: tf.Tensor, rate: float) -> tf.Tensor:
            if not training or not rate:
                return net
            seed = self.random.make_seeds()[:, 0]
            return tf.nn.experimental.stateless_dropout(net, rate, seed)

        net = conv(conv(images, "conv1"), "conv2")
        net = drop(tf.nn.max_pool2d(net, 2, 2, "VALID"), self.dropout[0])
        net = conv(conv(net, "conv3"), "conv4")
        net = drop(tf.nn.max_pool2d(net, 2, 2, "VALID"), self.dropout[1])
        net = tf.nn.relu(dense(tf.reshape(net, [-1, 8 * 8 * 100]), "dense1"))
        return dense(drop(net, self.dropout[2]), "dense2")


class Model:
    """A network with its loss and its optimizer."""

    slots_per_variable = 1

    def __init__(self, task: Task) -> None:
        self.task = task
        self.network = self.build()
        self.variables: dict[str, tf.Variable] = {}
        self.step = tf.function(self._train_step, autograph=False)
        self.logits = tf.function(
            lambda inputs: self.network(self.variables, inputs, training=False)
        )

    def build(self) -> Network:
        """Builds the network."""
        return Network(self.task.dropout)

    def apply(self, variable: tf.Variable, slots: list, gradient: tf.Tensor) -> None:
        """Applies the optimizer's rule, which written out would be several passes."""
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots[0].handle,
            lr=self.task.learning_rate,
            grad=gradient,
            momentum=self.task.momentum,
        )

    def load(self, values: Values) -> None:
        """Begins anew from these values."""
        if not self.variables:
            self.variables = {name: tf.Variable(one) for name, one in values.items()}
            self.steps = tf.Variable(0.0)
            self.slots = [
                [
                    tf.Variable(tf.zeros_like(one))
                    for _ in range(self.slots_per_variable)
                ]
                for one in values.values()
            ]
        for name, value in values.items():
            self.variables[name].assign(value)
        for slot in (self.steps, *itertools.chain(*self.slots)):
            slot.assign(tf.zeros_like(slot))

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of now."""
        return {name: one.numpy() for name, one in self.variables.items()}

    def train(self, batches: Iterable[Batch]) -> float:
        """Takes a step for each batch; returns the mean loss."""
        losses = [self.step(*map(tf.constant, batch)) for batch in batches]
        return float(tf.reduce_mean(losses))

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Computes logits."""
        return np.concatenate([self.logits(tf.constant(p)) for p in in_parts(inputs)])

    def _train_step(self, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        variables = list(self.variables.values())
        with tf.GradientTape() as tape:
            logits = self.network(self.variables, inputs, training=True)
            # Of logits: the only softmax is in here.
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        self.steps.assign_add(1.0)
        for own, slots, gradient in zip(
            variables, self.slots, tape.gradient(loss, variables), strict=True
        ):
            self.apply(own, slots, tf.convert_to_tensor(gradient))
        return loss
