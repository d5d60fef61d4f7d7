"""Sectioned towers: less memory for more time.

A tower computes the sections of its model one after another, and keeps only the
boundary tensors between them. The forward and backward pass of the last section are
one; then the others follow backwards, each recomputing its forward pass. All writing is
in the one synchronous update at the end, as with other towers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section, cut
from cifar10.towers.towers import Tower
from cifar10.towers.update import Gradient

Tensors: TypeAlias = "list[tf.Tensor]"
# Outputs, new values of the non-trainable variables, penalties.
Inferred: TypeAlias = "tuple[Tensors, list[tf.Tensor | None], Tensors]"


class SectionedTower(Tower):
    """A tower that computes the same as another one, section by section.

    Every model that it is called with, one for each set of variables, is cut at the
    same `places`, as in `cutting.cut`.
    """

    def __init__(self, tower: Tower, places: Sequence[int]) -> None:
        # Compiled as one program, the forward passes might be merged again.
        super().__init__(self._infer, tower.loss)
        self._tower = tower
        self._places = places
        self._functions: dict[tuple, list[SectionFunctions]] = {}

    def _infer(
        self,
        model: keras.Model,
        trainable: Tensors,
        non_trainable: Tensors,
        inputs: tf.Tensor,
        *,
        training: bool,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], Tensors]:
        """Computes what `model.inference` does, in training mode."""
        del training
        # The device with its worker: the body of a function does not inherit it. Frozen
        # batch normalization computes something else.
        device = tf.identity(tf.nest.flatten(inputs)[0]).device
        key = model, device, tuple(self.frozen)
        if key not in self._functions:
            self._functions[key] = [
                SectionFunctions(section, self._tower, device)
                for section in cut(model, self._places)
            ]
        # The latest values of variables and boundary tensors.
        values = by_id(model.trainable_variables, trainable)
        values |= by_id(model.non_trainable_variables, non_trainable)
        values |= by_id(model.inputs, tf.nest.flatten(inputs))
        changed: dict[int, tf.Tensor] = {}
        penalties: Tensors = []
        for functions in self._functions[key]:
            section = functions.section
            variables, start, taken = (
                [values[id(key)] for key in keys]
                for keys in (
                    section.trainable_variables,
                    section.non_trainable_variables,
                    section.input_tensors,
                )
            )
            outputs, statistics, added = functions(variables, start, taken)
            changed |= by_id(section.non_trainable_variables, statistics)
            values |= changed | by_id(section.output_tensors, outputs)
            penalties += added
        new = [changed.get(id(one)) for one in model.non_trainable_variables]
        return outputs[0], new, penalties


class SectionFunctions:
    """A section of a tower as functions of tensors alone, on one device.

    They are functions of their own: within a single one TensorFlow would decide which
    operation runs when, and might merge both forward passes into one. All take the
    values of the section's trainable and non-trainable variables, and its inputs.

    Attributes:
        forward: Computes outputs, new statistics and penalties.
        backward: Computes the section once more, and its gradients.
    """

    def __init__(self, section: Section, tower: Tower, device: str) -> None:
        self.section = section
        self._inference = tower.inference
        self._compiles = tower.xla

        def placed(compute: Callable) -> Any:
            def on_device(*arguments: Any) -> Any:
                with tf.device(device):
                    return compute(*arguments)

            return tf.function(
                on_device,
                autograph=False,
                jit_compile=tower.xla or None,
                # Otherwise the operations would be inlined into the step.
                experimental_attributes={"_noinline": True},
            )

        self.forward = placed(self._forward)
        self.backward = placed(self._backward)

    def __call__(self, variables: Tensors, start: Tensors, inputs: Tensors) -> Inferred:
        """Computes outputs, new statistics and penalties, and can be differentiated.

        The gradients are those of `backward`, unless the section is the last.
        """
        if not self.section.recomputed:
            # As part of the step, where each activation is freed once it was used.
            infer = self.forward if self._compiles else self._forward
            return infer(variables, start, inputs)
        known: list[Any] = []

        @tf.custom_gradient
        def compute(*arguments: tf.Tensor) -> tuple[Tensors, Callable]:
            taken = tf.nest.pack_sequence_as([variables, start, inputs], arguments)
            known[:] = self.forward(*taken)

            def gradients(*upstream: Gradient) -> list[Gradient]:
                of_variables, of_inputs = self.backward(*taken, list(upstream))
                return [*of_variables, *[None] * len(start), *of_inputs]

            outputs, _, penalties = known
            return [*outputs, *penalties], gradients

        results = compute(*variables, *start, *inputs)
        outputs, statistics, _ = known
        return results[: len(outputs)], statistics, results[len(outputs) :]

    def _forward(self, variables: Tensors, start: Tensors, inputs: Tensors) -> Inferred:
        return self._inference(self.section, variables, start, inputs, training=True)

    def _backward(
        self,
        variables: Tensors,
        start: Tensors,
        inputs: Tensors,
        upstream: Sequence[Gradient],
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Computes the gradients with respect to the variables and the inputs.

        With the values that `forward` had to `start` with, dropout draws the same
        masks. `upstream` holds the gradients with respect to outputs and penalties.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *self._differentiable(inputs)])
            outputs, _, penalties = self._forward(variables, start, inputs)
        reached = [
            (target, gradient)
            for target, gradient in zip([*outputs, *penalties], upstream, strict=True)
            if gradient is not None and target.dtype.is_floating
        ]
        targets, factors = map(list, zip(*reached, strict=True))
        return tape.gradient(targets, (variables, inputs), output_gradients=factors)

    def _differentiable(self, inputs: Tensors) -> Tensors:
        """Returns the inputs whose gradients an earlier section needs."""
        return [
            tensor
            for tensor, computed in zip(inputs, self.section.from_sections, strict=True)
            if computed and tensor.dtype.is_floating
        ]


def by_id(keys: Iterable[object], values: Iterable[Any]) -> dict[int, Any]:
    """Maps the ids of variables or tensors to their values, as far as there are any."""
    return {
        id(key): value
        for key, value in zip(keys, values, strict=True)
        if value is not None
    }
