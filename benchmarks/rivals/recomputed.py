"""TensorFlow's own way to less memory: `tf.recompute_grad`, in a single function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.towers.towers import Inference, Loss, TowerResult
from cifar10.towers.update import TrainState


class RecomputedTower:
    """Computes a tower whose sections but the last are computed again.

    It is right only for models without dropout: `tf.recompute_grad` takes floating
    arguments, and so the states of random generators are read anew.

    Args:
        inference: As for `Tower`.
        loss: As for `Tower`.
        sections: The model's sections.
    """

    def __init__(
        self, inference: Inference, loss: Loss, sections: Sequence[Section]
    ) -> None:
        self._inference = inference
        self._loss = loss
        self._sections = sections

    def __call__(
        self,
        state: TrainState,
        number: int,
        inputs: tf.Tensor,
        labels: tf.Tensor,
    ) -> TowerResult:
        """Computes one tower, as `Tower` does."""
        del number
        trainable = {
            id(variable): tf.identity(variable.value)
            for variable in state.model.trainable_variables
        }
        fresh: dict[int, tf.Tensor] = {}
        values = {id(state.model.inputs[0]): inputs}
        penalties: list[tf.Tensor] = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(trainable.values()))
            for section in self._sections:
                given, statistics, own = self._run(section, trainable, values)
                values |= zip(map(id, section.output_tensors), given, strict=True)
                pairs = zip(section.non_trainable_variables, statistics, strict=True)
                fresh |= {id(one): new for one, new in pairs if new is not None}
                penalties += own
            metrics = self._loss(given[0], labels, penalties)
        return TowerResult(
            metrics,
            tape.gradient(metrics["total_loss"], list(trainable.values())),
            [fresh.get(id(one)) for one in state.model.non_trainable_variables],
        )

    def _run(
        self,
        section: Section,
        trainable: dict[int, tf.Tensor],
        values: dict[int, tf.Tensor],
    ) -> Any:
        variables = [trainable[id(one)] for one in section.trainable_variables]
        taken = [values[id(tensor)] for tensor in section.input_tensors]
        start = [tf.identity(one.value) for one in section.non_trainable_variables]

        def compute(*arguments: tf.Tensor) -> Any:
            return self._inference(
                section,
                list(arguments[: len(variables)]),
                list(arguments[len(variables) : len(variables) + len(start)]),
                list(arguments[len(variables) + len(start) :]),
                training=True,
            )

        if section is self._sections[-1]:
            return compute(*variables, *start, *taken)
        return tf.recompute_grad(compute)(*variables, *start, *taken)
