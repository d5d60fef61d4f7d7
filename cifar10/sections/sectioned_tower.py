"""Sectioned towers: less memory for more time.

A tower computes the sections of its model one after another, and keeps only the
boundary tensors between them. The forward and backward pass of the last section are
one; then the others follow backwards, each recomputing its forward pass. All writing is
in the one synchronous update at the end, as with other towers.
"""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from cifar10.sections.cutting import Section, cut
from cifar10.towers.stages import find_frozen
from cifar10.towers.towers import Tower, TowerResult, read_for_tower, total
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Gradient

Tensors: TypeAlias = "list[tf.Tensor]"
# Of the loss, as scaled by the optimizer, with respect to the trainable variables of a
# section and to its input tensors. None stands for the model's inputs, and for tensors
# that the loss does not depend on.
Gradients: TypeAlias = "tuple[list[Gradient], list[Gradient]]"


class SectionedTower(Tower):
    """A tower that computes the same as another one, section by section.

    Every model that it is called with, one for each set of variables, is cut at the
    same `places`, as in `cutting.cut`.
    """

    def __init__(self, tower: Tower, places: Sequence[int]) -> None:
        super().__init__(tower.inference, tower.loss, xla=tower.xla)
        self._places = places
        self._functions: dict[tuple, list[SectionFunctions]] = {}

    def functions(self, state: TrainState, device: str) -> list["SectionFunctions"]:
        """Returns the functions of each section, placed on a device."""
        # Frozen batch normalization computes something else.
        key = state, device, tuple(self.frozen)
        if key not in self._functions:
            self._functions[key] = [
                SectionFunctions(section, self, device)
                for section in cut(state.model, self._places)
            ]
        return self._functions[key]

    def __call__(
        self, state: TrainState, number: int, inputs: tf.Tensor, labels: tf.Tensor
    ) -> TowerResult:
        """Computes a tower; the arguments are those of `Tower`.

        A boundary tensor is in memory until the last function that takes it has run,
        like any tensor of a graph.
        """
        model = state.model
        trainable, others = model.trainable_variables, model.non_trainable_variables
        # The device with its worker: the body of a function does not inherit it.
        labels = tf.identity(labels)
        *earlier, last = self.functions(state, labels.device)
        scale = tf.convert_to_tensor(state.optimizer.scale_loss(1.0))
        # The latest values of variables and boundary tensors.
        values = by_id(trainable, [tf.identity(one.value) for one in trainable])
        values |= by_id(others, [read_for_tower(one, number) for one in others])
        values |= by_id(model.inputs, tf.nest.flatten(inputs))
        changed: dict[int, tf.Tensor] = {}
        taken: list[list[list[tf.Tensor]]] = []
        penalties: list[tf.Tensor] = []
        for one in earlier:
            taken.append(one.arguments(values))
            outputs, statistics, added = one.forward(*taken[-1])
            changed |= by_id(one.section.non_trainable_variables, statistics)
            values |= changed | by_id(one.section.output_tensors, outputs)
            penalties += added

        metrics, statistics, computed = last.last(
            *last.arguments(values), labels, penalties, scale
        )
        changed |= by_id(last.section.non_trainable_variables, statistics)
        # One from each section that uses the variable or the boundary tensor.
        gradients: dict[int, list[Gradient]] = collections.defaultdict(list)
        last.collect(gradients, computed)
        for one in reversed(earlier):
            upstream = [gradients[id(tensor)] for tensor in one.section.output_tensors]
            one.collect(gradients, one.backward(*taken.pop(), upstream, scale))
        is_frozen = find_frozen(model, trainable, self.frozen)
        return TowerResult(
            metrics,
            [
                None if frozen else total(gradients[id(variable)])
                for variable, frozen in zip(trainable, is_frozen, strict=True)
            ],
            [changed.get(id(variable)) for variable in others],
        )


class SectionFunctions:
    """A section of a tower as functions of tensors alone, on one device.

    They are functions of their own: within a single one TensorFlow would decide which
    operation runs when, and might merge both forward passes into one. All take the
    values of the section's trainable and non-trainable variables, and its inputs.

    Attributes:
        forward: `_forward` as a `tf.function`, for each section but the last.
        backward: `_backward`, likewise.
        last: `_last`, for the last section.
    """

    def __init__(self, section: Section, tower: Tower, device: str) -> None:
        self.section = section
        self._tower = tower

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
        self.last = placed(self._last)

    def arguments(self, values: dict[int, Any]) -> list[list[Any]]:
        """Returns the values of the section's variables and inputs."""
        section = self.section
        keys = [section.trainable_variables, section.non_trainable_variables]
        return [
            [values[id(key)] for key in some] for some in [*keys, section.input_tensors]
        ]

    def collect(
        self, gradients: dict[int, list[Gradient]], computed: Gradients
    ) -> None:
        """Adds to the gradients so far what `backward` or `last` has computed."""
        keys = [*self.section.trainable_variables, *self.section.input_tensors]
        for key, gradient in by_id(keys, [*computed[0], *computed[1]]).items():
            gradients[key].append(gradient)

    def _forward(
        self, variables: Tensors, start: Tensors, inputs: Tensors
    ) -> tuple[Tensors, list[tf.Tensor | None], Tensors]:
        """Computes the outputs, the new statistics and the penalties."""
        return self._tower.inference(
            self.section, variables, start, inputs, training=True
        )

    def _last(
        self,
        variables: Tensors,
        start: Tensors,
        inputs: Tensors,
        labels: tf.Tensor,
        penalties: Tensors,
        scale: tf.Tensor,
    ) -> tuple[dict[str, tf.Tensor], list[tf.Tensor | None], Gradients]:
        """Computes the metrics, the new statistics and the gradients.

        `penalties` are those of the earlier sections, `scale` is the optimizer's.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *self._differentiable(inputs)])
            outputs, statistics, added = self._forward(variables, start, inputs)
            metrics = self._tower.loss(outputs[0], labels, [*penalties, *added])
        loss = metrics["total_loss"]
        gradients = tape.gradient(
            loss, (variables, inputs), output_gradients=tf.cast(scale, loss.dtype)
        )
        return metrics, statistics, gradients

    def _backward(
        self,
        variables: Tensors,
        start: Tensors,
        inputs: Tensors,
        upstream: Sequence[Sequence[Gradient]],
        scale: tf.Tensor,
    ) -> Gradients:
        """Computes the section once more, and its gradients.

        With the values that `forward` had to `start` with, dropout draws the same
        masks. `upstream` holds the gradients with respect to each of the outputs, one
        from each section that uses it.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*variables, *self._differentiable(inputs)])
            outputs, _, penalties = self._forward(variables, start, inputs)
        reached = [
            (output, gradient)
            for output, several in zip(outputs, upstream, strict=True)
            if (gradient := total(several)) is not None
        ]
        # The loss is a sum, in which each penalty has the optimizer's scale.
        reached += [(penalty, tf.cast(scale, penalty.dtype)) for penalty in penalties]
        if not reached:
            return [None] * len(variables), [None] * len(inputs)
        targets, factors = zip(*reached, strict=True)
        return tape.gradient(
            list(targets), (variables, inputs), output_gradients=list(factors)
        )

    def _differentiable(self, inputs: Tensors) -> Tensors:
        """Returns the inputs whose gradients an earlier section needs."""
        return [
            tensor
            for tensor, computed in zip(inputs, self.section.from_sections, strict=True)
            if computed and (tensor.dtype.is_floating or tensor.dtype.is_complex)
        ]


def by_id(keys: Iterable[object], values: Iterable[Any]) -> dict[int, Any]:
    """Maps the ids of variables or tensors to their values, as far as there are any."""
    return {
        id(key): value
        for key, value in zip(keys, values, strict=True)
        if value is not None
    }
