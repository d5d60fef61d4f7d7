"""Sectioned towers: less memory for more time.

A tower computes the sections of its model one after another, and keeps only the
boundary tensors between them. The last section runs forward and backward at once; then
the others run backward, last first, each recomputing its forward pass. All writing is
in the one synchronous update at the end, as with other towers.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.sections.cutting import Section, cut
from cifar10.towers.towers import Tower
from cifar10.towers.update import Gradient

Tensors: TypeAlias = "list[tf.Tensor]"
# Outputs, new values of the non-trainable variables, penalties.
Inferred: TypeAlias = "tuple[Tensors, list[tf.Tensor | None], Tensors]"
SectionFunction: TypeAlias = "Callable[[Tensors, Tensors, Tensors], Inferred]"


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
        self._functions: dict[tuple, list[tuple[Section, SectionFunction]]] = {}

    def _infer(
        self,
        model: keras.Model,
        trainable: Tensors,
        non_trainable: Tensors,
        inputs: tf.Tensor,
        *,
        training: bool,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], Tensors]:
        """Runs the sections like `model.inference` runs a model in training mode."""
        del training
        # The key has the device, whose worker a function's body does not inherit, and
        # the frozen layers, since frozen batch norm computes something else.
        device = tf.identity(tf.nest.flatten(inputs)[0]).device
        key = model, device, tuple(self.frozen)
        if key not in self._functions:
            self._functions[key] = [
                (section, section_function(section, self._tower, device))
                for section in cut(model, self._places)
            ]
        values = dict(zip(map(id, model.inputs), tf.nest.flatten(inputs), strict=True))
        changed: list[tf.Tensor | None] = [None] * len(non_trainable)
        penalties: Tensors = []
        for section, function in self._functions[key]:
            taken = [values[id(tensor)] for tensor in section.input_tensors]
            start = _updated(non_trainable, changed)
            outputs, statistics, added = function(trainable, start, taken)
            changed = _updated(changed, statistics)
            values |= zip(map(id, section.output_tensors), outputs, strict=True)
            penalties += added
        return outputs[0], changed, penalties


def section_function(section: Section, tower: Tower, device: str) -> SectionFunction:
    """Returns a section of a tower as a function of tensors alone, on one device.

    From the values of the model's trainable and non-trainable variables, and the
    section's inputs, it computes outputs, new statistics and penalties. Unless the
    section is the last, differentiating it computes the section once more.
    """

    def infer(variables: Tensors, start: Tensors, inputs: Tensors) -> Inferred:
        return tower.inference(section, variables, start, inputs, training=True)

    def recompute(
        variables: Tensors,
        start: Tensors,
        inputs: Tensors,
        upstream: Sequence[Gradient],
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Computes the gradients with respect to the variables and the inputs.

        Dropout draws the same masks, because `start` has the values with which
        `forward` began. `upstream` has the gradients of outputs and penalties.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            for tensor, computed in zip(inputs, section.from_sections, strict=True):
                if computed and tensor.dtype.is_floating:
                    tape.watch(tensor)
            outputs, _, penalties = infer(variables, start, inputs)
        reached = [
            (target, gradient)
            for target, gradient in zip([*outputs, *penalties], upstream, strict=True)
            if gradient is not None and target.dtype.is_floating
        ]
        targets, factors = map(list, zip(*reached, strict=True))
        return tape.gradient(targets, (variables, inputs), output_gradients=factors)

    forward = _own_function(infer, device, xla=tower.xla)
    if not section.recomputed:
        # As part of the step, where each activation is freed once it was used.
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
    """Makes a separate function that computes on a device.

    In a single function for both passes TensorFlow would choose the order of their
    operations, and might merge the two forward passes.
    """

    def on_device(*arguments: Any) -> Any:
        with tf.device(device):
            return compute(*arguments)

    return tf.function(
        on_device,
        autograph=False,
        jit_compile=xla or None,
        # Otherwise the operations would be inlined into the step.
        experimental_attributes={"_noinline": True},
    )


def _updated(values: Sequence[Any], changed: Sequence[tf.Tensor | None]) -> list[Any]:
    """Returns the changed values, and the others as they were."""
    pairs = zip(values, changed, strict=True)
    return [old if new is None else new for old, new in pairs]
