"""A section of one tower, forward and backward, as pure functions of tensors."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section
from cifar10.towers.towers import Tower, total
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient


class Forward(NamedTuple):
    """What a section computes forward."""

    outputs: list[tf.Tensor]  # The values of `section.output_tensors`.
    statistics: list[tf.Tensor | None]  # As in `TowerResult`.
    penalties: list[tf.Tensor]  # Scalars that its layers add to the loss.


class Backward(NamedTuple):
    """The gradients of the loss with respect to what a section computes from."""

    variables: list[Gradient]  # One for each of its trainable variables.
    # One for each of `section.input_tensors`; None for the model's inputs, and where
    # the loss does not depend on the tensor or it has no gradient.
    inputs: list[Gradient]


class SectionFunctions(NamedTuple):
    """The functions that compute the sections of one tower.

    Each section has functions of its own: within a single one TensorFlow would decide
    what runs when, and might merge both forward passes into one.
    """

    sections: Sequence[Section]
    forward: list[Any]  # `SectionTower.forward` of each section but the last.
    last: Any  # `SectionTower.last` of the last section.
    backward: list[Any]  # `SectionTower.backward` of each section but the last.


class SectionTower:
    """Computes sections as `tower` computes the model; it reads and never writes."""

    def __init__(self, state: TrainState, tower: Tower) -> None:
        self._state = state
        self._tower = tower

    def functions(self, sections: Sequence[Section], device: str) -> SectionFunctions:
        """Builds the functions of a tower on a device."""

        def function(compute: Callable, section: Section) -> Any:
            def placed(*arguments: Any) -> Any:
                with tf.device(device):
                    return compute(section, *arguments)

            return tf.function(
                placed,
                autograph=False,
                # Otherwise the operations would be inlined into the step.
                experimental_attributes={"_noinline": True},
            )

        *earlier, last = sections
        return SectionFunctions(
            sections,
            [function(self.forward, section) for section in earlier],
            function(self.last, last),
            [function(self.backward, section) for section in earlier],
        )

    def forward(
        self, section: Section, start: list[tf.Tensor], inputs: list[tf.Tensor]
    ) -> Forward:
        """Computes a section from values of its non-trainable variables and inputs."""

        def compute(*values: Any) -> tuple:
            return self._tower.inference(section, *values, training=True)

        return Forward(*self._compiled(compute)(_read(section), start, inputs))

    def last(
        self,
        section: Section,
        start: list[tf.Tensor],
        inputs: list[tf.Tensor],
        labels: tf.Tensor,
        penalties: list[list[tf.Tensor]],
    ) -> tuple[
        dict[str, tf.Tensor], list[tf.Tensor | None], Backward, list[list[Gradient]]
    ]:
        """Computes the last section, the loss and their gradients.

        `start` and `inputs` are as for `forward`; `penalties` are those of each earlier
        section.

        Returns:
            The metrics; the new statistics, as in `Forward`; the gradients of the loss,
            as scaled by the optimizer; and its gradients with respect to `penalties`.
        """
        optimizer = self._state.optimizer

        def compute(
            variables: list[tf.Tensor],
            start: list[tf.Tensor],
            inputs: list[tf.Tensor],
            labels: tf.Tensor,
            penalties: list[list[tf.Tensor]],
            scale: tf.Tensor,
        ) -> tuple:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([*variables, *_watched(section, inputs), *penalties])
                outputs, statistics, added = self._tower.inference(
                    section, variables, start, inputs, training=True
                )
                metrics = self._tower.loss(
                    outputs[0], labels, [*itertools.chain(*penalties), *added]
                )
                scaled = metrics["total_loss"]
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                    scaled *= tf.cast(scale, scaled.dtype)
            gradients, input_gradients, penalty_gradients = tape.gradient(
                scaled, [variables, _watched(section, inputs), penalties]
            )
            backward = Backward(gradients, _in_place(section, inputs, input_gradients))
            return metrics, statistics, backward, penalty_gradients

        scale = tf.convert_to_tensor(optimizer.scale_loss(1.0))
        return self._compiled(compute)(
            _read(section), start, inputs, labels, penalties, scale
        )

    def backward(
        self,
        section: Section,
        start: list[tf.Tensor],
        inputs: list[tf.Tensor],
        upstream: Sequence[Sequence[Gradient]],
        penalty_gradients: Sequence[Gradient],
    ) -> Backward:
        """Recomputes a section, and computes its gradients.

        With the values that `forward` had to `start` with, dropout draws the same
        masks. `upstream` holds the gradients with respect to each of its outputs, one
        from each section that uses it.
        """

        def compute(
            variables: list[tf.Tensor],
            start: list[tf.Tensor],
            inputs: list[tf.Tensor],
            upstream: Sequence[Sequence[Gradient]],
            penalty_gradients: Sequence[Gradient],
        ) -> Backward:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([*variables, *_watched(section, inputs)])
                outputs, _, penalties = self._tower.inference(
                    section, variables, start, inputs, training=True
                )
            reached = [
                (tensor, gradient)
                for tensor, gradient in [
                    *zip(outputs, map(total, upstream), strict=True),
                    *zip(penalties, penalty_gradients, strict=True),
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

        return self._compiled(compute)(
            _read(section), start, inputs, upstream, penalty_gradients
        )

    def _compiled(self, compute: Callable) -> Callable:
        """Returns a function that takes only tensors, compiled by XLA if requested."""
        if not self._tower.xla:
            return compute
        return tf.function(compute, jit_compile=True, autograph=False)


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
