"""A section of one tower, forward and backward, as pure functions of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.towers.towers import Inference, Loss
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient


class Forward(NamedTuple):
    """What a section computes forward.

    Attributes:
        outputs: The values of `section.output_tensors`.
        statistics: New values of its non-trainable variables; None for those left as
            they are.
        penalties: Scalars that its layers add to the loss.
    """

    outputs: list[tf.Tensor]
    statistics: list[tf.Tensor | None]
    penalties: list[tf.Tensor]


class Backward(NamedTuple):
    """The gradients of the loss with respect to what a section computes from.

    Attributes:
        variables: One for each of its trainable variables.
        inputs: One for each of `section.input_tensors`; None for the model's inputs,
            and where the loss does not depend on the tensor or it has no gradient.
    """

    variables: list[Gradient]
    inputs: list[Gradient]


class SectionTower:
    """Computes the sections of a tower; it reads the state and never writes.

    Args:
        inference: As for `Tower`; it is called with a section instead of the model.
        loss: As for `Tower`.
    """

    def __init__(self, inference: Inference, loss: Loss) -> None:
        self._inference = inference
        self._loss = loss

    def forward(
        self, section: Section, start: list[tf.Tensor], inputs: list[tf.Tensor]
    ) -> Forward:
        """Computes a section.

        Args:
            section: The section.
            start: Values of its non-trainable variables.
            inputs: The values of `section.input_tensors`.
        """
        return Forward(
            *self._inference(section, _read(section), start, inputs, training=True)
        )

    def last(
        self,
        state: TrainState,
        section: Section,
        start: list[tf.Tensor],
        inputs: list[tf.Tensor],
        labels: tf.Tensor,
        penalties: list[list[tf.Tensor]],
    ) -> tuple[dict[str, tf.Tensor], Forward, Backward, list[list[Gradient]]]:
        """Computes the last section, the loss and their gradients.

        Args:
            state: Its optimizer scales the loss.
            section: The last section; it gives the model's output.
            start: Values of its non-trainable variables.
            inputs: The values of `section.input_tensors`.
            labels: What the loss takes, [batch, ...].
            penalties: The penalties of each earlier section.

        Returns:
            The metrics; the forward results; the gradients of the loss, as scaled by
            the optimizer; and its gradients with respect to `penalties`.
        """
        variables = _read(section)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *_watched(section, inputs), *penalties])
            computed = Forward(
                *self._inference(section, variables, start, inputs, training=True)
            )
            all_penalties = list(itertools.chain(*penalties, computed.penalties))
            metrics = self._loss(computed.outputs[0], labels, all_penalties)
            scaled = metrics["total_loss"]
            if isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
                scale = state.optimizer.scale_loss(1.0)
                scaled *= tf.cast(scale, scaled.dtype)
        gradients, input_gradients, penalty_gradients = tape.gradient(
            scaled, [variables, _watched(section, inputs), penalties]
        )
        backward = Backward(gradients, _in_place(section, inputs, input_gradients))
        return metrics, computed, backward, penalty_gradients

    def backward(
        self,
        section: Section,
        start: list[tf.Tensor],
        inputs: list[tf.Tensor],
        upstream: Sequence[Sequence[Gradient]],
        penalty_gradients: Sequence[Gradient],
    ) -> Backward:
        """Recomputes a section, and computes its gradients.

        Args:
            section: The section.
            start: Values of its non-trainable variables, as for `forward`: with them
                dropout draws the same masks.
            inputs: The values of `section.input_tensors`.
            upstream: The gradients with respect to each of its outputs, one from each
                section that uses it.
            penalty_gradients: The gradients with respect to its penalties.
        """
        variables = _read(section)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *_watched(section, inputs)])
            computed = Forward(
                *self._inference(section, variables, start, inputs, training=True)
            )
        reached = [
            (tensor, gradient)
            for tensor, gradient in [
                *zip(computed.outputs, map(total, upstream), strict=True),
                *zip(computed.penalties, penalty_gradients, strict=True),
            ]
            if gradient is not None
        ]
        if not reached:
            return Backward([None] * len(variables), [None] * len(inputs))
        gradients, input_gradients = tape.gradient(
            [tensor for tensor, _ in reached],
            [variables, _watched(section, inputs)],
            output_gradients=[gradient for _, gradient in reached],
        )
        return Backward(gradients, _in_place(section, inputs, input_gradients))


def total(gradients: Sequence[Gradient]) -> Gradient:
    """Returns the sum of gradients; None if all are."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        # Side by side: equal indices add up when they are applied.
        return tf.IndexedSlices(
            tf.concat([gradient.values for gradient in present], axis=0),
            tf.concat([gradient.indices for gradient in present], axis=0),
            present[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in present])


def _read(section: Section) -> list[tf.Tensor]:
    return [tf.identity(variable.value) for variable in section.trainable_variables]


def _has_gradient(section: Section, inputs: list[tf.Tensor]) -> list[bool]:
    return [
        from_section and (tensor.dtype.is_floating or tensor.dtype.is_complex)
        for from_section, tensor in zip(section.from_sections, inputs, strict=True)
    ]


def _watched(section: Section, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    return list(itertools.compress(inputs, _has_gradient(section, inputs)))


def _in_place(
    section: Section, inputs: list[tf.Tensor], watched_gradients: Sequence[Gradient]
) -> list[Gradient]:
    """Puts None in the places of tensors that have no gradient."""
    gradients = iter(watched_gradients)
    return [next(gradients) if has else None for has in _has_gradient(section, inputs)]
