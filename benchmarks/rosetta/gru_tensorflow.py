"""Plain TensorFlow: a GRU by hand in a loop; the rest as in `cnn_tensorflow.py`."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.rosetta import cnn_tensorflow


class Network:
    """From numbers of words to logits."""

    def __call__(self, values: dict, words: tf.Tensor, *, training: bool) -> tf.Tensor:
        """Computes logits from the last state."""
        del training  # It has no dropout.
        embedded = tf.nn.embedding_lookup(values["embedding/embedding"], words)
        recurrent = tf.convert_to_tensor(values["gru/recurrent_kernel"])
        of_input, of_state = tf.unstack(values["gru/bias"])

        def step(state: tf.Tensor, gates: tf.Tensor) -> tf.Tensor:
            update_in, reset_in, new_in = tf.split(gates, 3, axis=1)
            own = tf.split(tf.matmul(state, recurrent) + of_state, 3, axis=1)
            update = tf.sigmoid(update_in + own[0])
            reset = tf.sigmoid(reset_in + own[1])
            new = tf.tanh(new_in + reset * own[2])
            return update * state + (1.0 - update) * new

        # The inputs' part of all words at once, and word by word only the state's.
        gates = tf.tensordot(embedded, values["gru/kernel"], 1) + of_input
        nothing = tf.zeros([words.shape[0], 100])
        last = tf.foldl(step, tf.transpose(gates, [1, 0, 2]), nothing)
        return tf.matmul(last, values["dense/kernel"]) + values["dense/bias"]


class Model(cnn_tensorflow.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    slots_per_variable = 2

    def build(self) -> Network:
        """Builds the network."""
        return Network()

    def apply(self, variable: tf.Variable, slots: list, gradient: tf.Tensor) -> None:
        """Applies the optimizer's rule."""
        if self.task.optimizer == "sgd":
            super().apply(variable, slots, gradient)
            return
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=slots[0].handle,
            v=slots[1].handle,
            beta1_power=0.9**self.steps,
            beta2_power=0.999**self.steps,
            lr=self.task.learning_rate,
            beta1=0.9,
            beta2=0.999,
            epsilon=self.task.epsilon,
            grad=gradient,
        )
