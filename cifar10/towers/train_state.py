"""What a training updates: variables, optimizer, averages and step."""

from typing import Any

import keras
import tensorflow as tf

# Where the variables live and the gradients meet, unless the caller says otherwise.
UPDATE_DEVICE = "/cpu:0"


class TrainState:
    """Everything a synchronous update writes.

    All variables live on `device`, those of the model included. The optimizer is built
    here for them.

    Attributes:
        averages: Moving averages of the trainable variables, in their order.
        global_step: int64 [], updates applied so far, and those skipped because a
            number was not finite.
        halted: bool [], whether a step was not finite and no update is applied any
            more; no checkpoint holds it.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        device: str = UPDATE_DEVICE,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        with tf.device(device):
            optimizer.build(model.trainable_variables)
            self.averages = [
                tf.Variable(variable.value, trainable=False)
                for variable in model.trainable_variables
            ]
            self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.halted = tf.Variable(False, trainable=False)

    def variables(self) -> list[tf.Variable]:
        """Returns every variable that a step writes but `halted`, in a fixed order."""
        keras_variables = [
            *self.model.trainable_variables,
            *self.model.non_trainable_variables,
            *self.optimizer.variables,
        ]
        return [
            *[variable.value for variable in keras_variables],
            *self.averages,
            self.global_step,
        ]

    def trackables(self) -> dict[str, Any]:
        """Returns what a checkpoint holds, by name; evaluation reads a part of it."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "averages": self.averages,
            "global_step": self.global_step,
            # Named once more, because Keras does not show TensorFlow the state of
            # random generators.
            "non_trainable": [v.value for v in self.model.non_trainable_variables],
        }
