"""Sectioned towers, which need less memory and more time.

A sectioned tower computes the sections of a model one after another, and keeps only the
boundary tensors between sections. The last section runs forward, then backward.
The other sections then run backward in reverse order, and each recomputes its forward
pass. As with other towers, only the synchronous update writes variables.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.sections.cutting import Section, cut
from cifar10.towers.copies import Gradient, OptionalTensor, Tensors
from cifar10.towers.towers import Tower

# Outputs, new values of the non-trainable variables, penalties.
Inferred: TypeAlias = "tuple[Tensors, list[OptionalTensor], Tensors]"
SectionFunction: TypeAlias = "Callable[[Tensors, Tensors, Tensors], Inferred]"


class SectionedTower(Tower):
    """Computes the same as another tower, section by section.

    Each replica calls the tower with its own model. All models are cut at the same
    `starts`, which `cutting.cut` describes.
    """

    def __init__(self, tower: Tower, starts: Sequence[int]) -> None:
        # Not with `xla`: one compiled program might merge the repeated forward passes.
        super().__init__(self._infer, tower.loss)
        self._tower = tower
        self._starts = starts
        self._functions: dict[tuple, list[tuple[Section, SectionFunction]]] = {}

    def _infer(
        self,
        model: keras.Model,
        trainable: Tensors,
        non_trainable: Tensors,
        inputs: tf.Tensor,
        *,
        training: bool,
    ) -> tuple[tf.Tensor, list[OptionalTensor], Tensors]:
        """Computes `model.inference` in training mode, section by section."""
        del training
        # The key includes the device, because a function's body does not inherit the
        # worker, and frozen names, because frozen batch norm computes differently.
        device = tf.identity(tf.nest.flatten(inputs)[0]).device
        if (key := (model, device, tuple(self.frozen))) not in self._functions:
            self._functions[key] = [
                (section, section_function(section, self._tower, device))
                for section in cut(model, self._starts)
            ]
        values = dict(zip(map(id, model.inputs), tf.nest.flatten(inputs), strict=True))
        changed: list[OptionalTensor] = [None] * len(non_trainable)
        unassigned = [None] * len(trainable)
        penalties: Tensors = []
        for section, function in self._functions[key]:
            taken = [values[id(tensor)] for tensor in section.input_tensors]
            start = _updated(non_trainable, changed)
            outputs, statistics, added = function(trainable, start, taken)
            changed = _updated(changed, statistics)
            values |= zip(map(id, section.output_tensors), outputs, strict=True)
            penalties += added
        return outputs[0], [*changed, *unassigned], penalties


def section_function(section: Section, tower: Tower, device: str) -> SectionFunction:
    """Returns a function of tensors that computes a section of a tower on a device.

    The function takes the values of the model's trainable and non-trainable variables
    and the section's inputs, and returns outputs, new statistics and penalties. The
    gradient recomputes the section, unless the section is the last one.
    """

    def infer(variables: Tensors, start: Tensors, inputs: Tensors) -> Inferred:
        inferred = tower.inference(section, variables, start, inputs, training=True)
        outputs, assigned, penalties = inferred
        if any(value is not None for value in assigned[len(start) :]):
            raise UsageError(
                "--sections: a layer of the model assigns its trainable variables, as "
                "SpectralNormalization does. Leave out --sections."
            )
        return outputs, assigned[: len(start)], penalties

    def recompute(
        variables: Tensors, start: Tensors, inputs: Tensors, upstream: list[Gradient]
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Computes the gradients with respect to the variables and the inputs.

        `start` holds the forward pass's non-trainable values, so dropout draws the same
        masks. `upstream` holds the gradients with respect to the outputs and penalties.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            for tensor, computed in zip(inputs, section.from_sections, strict=True):
                if computed and tensor.dtype.is_floating:
                    tape.watch(tensor)
            outputs, _, penalties = infer(variables, start, inputs)
        pairs = zip([*outputs, *penalties], upstream, strict=True)
        reached = [(t, g) for t, g in pairs if g is not None and t.dtype.is_floating]
        targets, factors = map(list, zip(*reached, strict=True))
        return tape.gradient(targets, (variables, inputs), output_gradients=factors)

    forward = _own_function(infer, device, xla=tower.xla)
    if not section.recomputed:
        # Inlined into the step, which frees each activation after its last use.
        return forward if tower.xla else infer
    backward = _own_function(recompute, device, xla=tower.xla)

    def compute(variables: Tensors, start: Tensors, inputs: Tensors) -> Inferred:
        known: list[Any] = []

        @tf.custom_gradient
        def differentiable(*arguments: tf.Tensor) -> tuple[Tensors, Callable]:
            taken = tf.nest.pack_sequence_as([variables, start, inputs], arguments)
            known[:] = forward(*taken)

            def gradients(*upstream: Gradient) -> list[Gradient]:
                of_variables, of_inputs = backward(*taken, list(upstream))
                return [*of_variables, *[None] * len(start), *of_inputs]

            outputs, _, penalties = known
            return [*outputs, *penalties], gradients

        results = differentiable(*variables, *start, *inputs)
        outputs, statistics, _ = known
        return results[: len(outputs)], statistics, results[len(outputs) :]

    return compute


def _own_function(compute: Callable, device: str, *, xla: bool) -> Any:
    """Wraps a function in a separate `tf.function` on a device."""
    # In a single function for all passes, TensorFlow would choose the order of the
    # operations, and might merge a section's forward pass with its recomputation.

    def on_device(*arguments: Any) -> Any:
        with tf.device(device):
            return compute(*arguments)

    return tf.function(
        on_device,
        autograph=False,
        jit_compile=xla or None,
        # Otherwise TensorFlow would inline the operations into the step.
        experimental_attributes={"_noinline": True},
    )


def _updated(values: Sequence[Any], changed: Sequence[OptionalTensor]) -> list[Any]:
    """Returns `changed`, with each None replaced by the value from `values`."""
    pairs = zip(values, changed, strict=True)
    return [old if new is None else new for old, new in pairs]
