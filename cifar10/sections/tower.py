"""A section of one tower, forward and backward, as pure functions of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.towers.averaging import Gradient
from cifar10.towers.tower import Inference, Loss
from cifar10.towers.train_state import TrainState


class Forward(NamedTuple):
    """What a section computes forward.

    Attributes:
        given: The tensors of `section.gives`.
        statistics: New values of its non-trainable variables; None for those left as
            they are.
        penalties: Scalars that its layers add to the loss.
    """

    given: list[tf.Tensor]
    statistics: list[tf.Tensor | None]
    penalties: list[tf.Tensor]


class Backward(NamedTuple):
    """The gradients of the loss with respect to what a section computes from.

    Attributes:
        variables: One for each of its trainable variables.
        taken: One for each tensor of `section.takes`; None for the model's inputs,
            and where the loss does not depend on it or it has no gradient.
    """

    variables: list[Gradient]
    taken: list[Gradient]


class SectionTower:
    """Computes sections of a tower; it reads the state and never writes.

    Args:
        inference: As for `Tower`; it is called with a section in the model's place.
        loss: As for `Tower`.
    """

    def __init__(self, inference: Inference, loss: Loss) -> None:
        self._inference = inference
        self._loss = loss

    def forward(
        self, section: Section, start: list[tf.Tensor], taken: list[tf.Tensor]
    ) -> Forward:
        """Computes a section.

        Args:
            section: The section.
            start: Values of its non-trainable variables.
            taken: The tensors of `section.takes`.
        """
        return Forward(
            *self._inference(section, _read(section), start, taken, training=True)
        )

    def last(
        self,
        state: TrainState,
        section: Section,
        start: list[tf.Tensor],
        taken: list[tf.Tensor],
        labels: tf.Tensor,
        penalties: list[list[tf.Tensor]],
    ) -> tuple[dict[str, tf.Tensor], Forward, Backward, list[list[Gradient]]]:
        """Computes the last section, the loss and their gradients.

        Args:
            state: Whose optimizer scales the loss.
            section: The last section; it gives the model's output.
            start: Values of its non-trainable variables.
            taken: The tensors of `section.takes`.
            labels: What the loss takes, [batch, ...].
            penalties: Those of each earlier section.

        Returns:
            The metrics; what is computed forward; the gradients, scaled as the
            optimizer wants it, and those with respect to `penalties`.
        """
        variables = _read(section)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *_watched(section, taken), *penalties])
            computed = Forward(
                *self._inference(section, variables, start, taken, training=True)
            )
            everything = [
                one for own in [*penalties, computed.penalties] for one in own
            ]
            metrics = self._loss(computed.given[0], labels, everything)
            scaled = metrics["total_loss"]
            if isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
                scale = state.optimizer.scale_loss(1.0)
                scaled *= tf.cast(scale, scaled.dtype)
        own, through, of_penalties = tape.gradient(
            scaled, [variables, _watched(section, taken), penalties]
        )
        backward = Backward(own, _in_place(section, taken, through))
        return metrics, computed, backward, of_penalties

    def backward(
        self,
        section: Section,
        start: list[tf.Tensor],
        taken: list[tf.Tensor],
        upstream: Sequence[Sequence[Gradient]],
        of_penalties: Sequence[Gradient],
    ) -> Backward:
        """Computes a section once more, and its gradients.

        Args:
            section: The section.
            start: Values of its non-trainable variables, as for `forward`: with them
                dropout draws the same masks.
            taken: The tensors of `section.takes`.
            upstream: The gradients with respect to each tensor that it gives, from each
                section that takes it.
            of_penalties: The gradients with respect to its penalties.
        """
        variables = _read(section)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *_watched(section, taken)])
            computed = Forward(
                *self._inference(section, variables, start, taken, training=True)
            )
        reached = [
            (tensor, gradient)
            for tensor, gradient in [
                *zip(computed.given, map(total, upstream), strict=True),
                *zip(computed.penalties, of_penalties, strict=True),
            ]
            if gradient is not None
        ]
        if not reached:
            return Backward([None] * len(variables), [None] * len(taken))
        own, through = tape.gradient(
            [tensor for tensor, _ in reached],
            [variables, _watched(section, taken)],
            output_gradients=[gradient for _, gradient in reached],
        )
        return Backward(own, _in_place(section, taken, through))


def total(gradients: Sequence[Gradient]) -> Gradient:
    """Returns the sum of gradients; None if all are."""
    present = [one for one in gradients if one is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(one, tf.IndexedSlices) for one in present):
        # Side by side: equal indices add up when they are applied.
        return tf.IndexedSlices(
            tf.concat([one.values for one in present], axis=0),
            tf.concat([one.indices for one in present], axis=0),
            present[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(one) for one in present])


def _read(section: Section) -> list[tf.Tensor]:
    return [tf.identity(variable.value) for variable in section.trainable_variables]


def _has_gradient(section: Section, taken: list[tf.Tensor]) -> list[bool]:
    return [
        wanted and (one.dtype.is_floating or one.dtype.is_complex)
        for wanted, one in zip(section.from_sections, taken, strict=True)
    ]


def _watched(section: Section, taken: list[tf.Tensor]) -> list[tf.Tensor]:
    return list(itertools.compress(taken, _has_gradient(section, taken)))


def _in_place(
    section: Section, taken: list[tf.Tensor], of_watched: Sequence[Gradient]
) -> list[Gradient]:
    """Puts None in the places of tensors that have no gradient."""
    found = iter(of_watched)
    return [next(found) if has else None for has in _has_gradient(section, taken)]
