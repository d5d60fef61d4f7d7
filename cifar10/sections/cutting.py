"""Sections: parts of a model that a tower computes one after another.

PartialFlow's idea (https://github.com/jakob-bauer/partialflow): of all activations only
the boundary tensors between sections are kept, and a section recomputes the others when
its gradients are due. Here a model is cut; `cycle.py` orders the parts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.sections import statefulness

_SHOWN_NAMES = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or operation in a model's graph.

    Attributes:
        operation: The layer or operation.
        node: What Keras knows about the call.
    """

    operation: Any
    node: Any

    @property
    def input_tensors(self) -> list[keras.KerasTensor]:
        """The tensors it is called with."""
        return self.node.input_tensors

    @property
    def output_tensors(self) -> list[keras.KerasTensor]:
        """The tensors it returns."""
        return self.node.output_tensors


class Section(keras.layers.Layer):
    """Some calls of a model as a layer, which shares the model's variables.

    Both its inputs and its outputs are lists of tensors.

    Args:
        calls: The calls, in their order.
        input_tensors: The tensors of earlier sections, or the model's inputs.
        output_tensors: The tensors that later sections use, or the model's output.
        counted: Ids of the variables whose weight decay an earlier section counts.
        recomputed: Whether its forward pass runs once more for its gradients.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        input_tensors: Sequence[keras.KerasTensor],
        output_tensors: Sequence[keras.KerasTensor],
        counted: Collection[int] = (),
        *,
        recomputed: bool = False,
    ) -> None:
        super().__init__(autocast=False, name="section")
        self.recomputed = recomputed
        # The gradients of a model's inputs are not needed, and they take time.
        self.from_sections = tuple(not _is_input(tensor) for tensor in input_tensors)
        self.counted = frozenset(counted)
        self.calls = tuple(calls)
        self.input_tensors = tuple(input_tensors)
        self.output_tensors = tuple(output_tensors)
        self.parts = [
            call.operation
            for call in calls
            if isinstance(call.operation, keras.layers.Layer)
        ]
        self.built = True

    def call(
        self, inputs: list[tf.Tensor], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Makes the calls as the model does."""
        values = {
            # A model casts its inputs to the type that it declares for them.
            id(tensor): tf.cast(value, tensor.dtype) if _is_input(tensor) else value
            for tensor, value in zip(self.input_tensors, inputs, strict=True)
        }
        for call in self.calls:
            self.make(call, values, training=training)
        return [values[id(tensor)] for tensor in self.output_tensors]

    def make(
        self, call: Call, values: dict[int, tf.Tensor], *, training: bool | None
    ) -> None:
        """Makes one call.

        Args:
            call: The call.
            values: By the id of the model's tensors; what it returns is added.
            training: As in `call`.

        Raises:
            UsageError: It cannot be computed twice.
        """
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        args, kwargs = call.node.arguments.fill_in(values)
        if "training" in getattr(call.operation, "_call_context_args", ()):
            kwargs["training"] = training
        outputs = tf.nest.flatten(call.operation(*args, **kwargs))
        values |= zip(map(id, call.output_tensors), outputs, strict=True)
        made = graph.get_operations()[before:]
        if self.recomputed and (types := statefulness.stateful_types(graph, made)):
            raise UsageError(
                f"--sections: layer {call.operation.name} cannot be computed twice: "
                f"the second time {', '.join(sorted(types))} would compute something "
                "else.\n"
                "Draw random numbers with keras.random and a SeedGenerator, keep "
                "state in variables of the layer, or leave it to the last section."
            )

    # Keras collects them anew each time, and a cycle asks often.
    @functools.cached_property
    def trainable_variables(self) -> list[keras.Variable]:
        """The variables that have gradients."""
        return super().trainable_variables

    @functools.cached_property
    def non_trainable_variables(self) -> list[keras.Variable]:
        """Batch statistics and the state of random generators."""
        return super().non_trainable_variables

    @property
    def losses(self) -> list[tf.Tensor]:
        """The penalties of its calls, and the weight decay that it counts."""
        penalties = super().losses
        decayed = [v for v in self.trainable_variables if v.regularizer is not None]
        # Keras puts the weight decay last, in the order of the variables.
        if not decayed:
            return penalties
        others, decay = penalties[: -len(decayed)], penalties[-len(decayed) :]
        return others + [
            penalty
            for penalty, variable in zip(decay, decayed, strict=True)
            if id(variable) not in self.counted
        ]


class WholeModel(Section):
    """A model as its only section, whether or not it is a graph of layers.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        input_tensors = model.inputs if models.is_graph(model) else [object()]
        super().__init__((), input_tensors, ())
        self.parts = [model]

    def call(
        self, inputs: list[tf.Tensor], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Calls the model."""
        return [self.parts[0](*inputs, training=training)]


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a model's layers, each after those whose outputs it uses.

    Raises:
        UsageError: The model is not a graph of layers with one output.
    """
    if not models.is_graph(model) or len(model.outputs) != 1:
        raise UsageError(
            f"--sections: the model is of class {type(model).__name__}, and only a "
            "graph of layers with one output can be cut: a keras.Sequential, or "
            "keras.Model(inputs, outputs)."
        )
    # In Keras's own order, so that stateful layers that are called on several branches
    # advance their state in the same order. There is no public way to it.
    graph = getattr(model, "_functional", model)
    by_depth = graph._nodes_by_depth  # noqa: SLF001
    return [
        Call(node.operation, node)
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if not node.is_input
    ]


def crossing(
    model: keras.Model, before: Sequence[Call], after: Sequence[Call]
) -> list[keras.KerasTensor]:
    """Returns the tensors that cross a boundary between calls, without the inputs.

    Args:
        model: The model.
        before: Calls before the boundary.
        after: All calls after it.
    """
    needed = {id(tensor) for call in after for tensor in call.input_tensors}
    needed.update(map(id, model.outputs))
    return [
        tensor
        for call in before
        for tensor in call.output_tensors
        if id(tensor) in needed
    ]


def is_masked(tensor: keras.KerasTensor) -> bool:
    """Tells whether a tensor has a mask, which cannot cross a boundary."""
    return getattr(tensor, "_keras_mask", None) is not None


def _is_input(tensor: object) -> bool:
    if not isinstance(tensor, keras.KerasTensor):
        return True  # A subclassed model has no symbolic inputs.
    operation = tensor._keras_history.operation  # noqa: SLF001 - as in `calls_of`.
    return isinstance(operation, keras.layers.InputLayer)


def cut(
    model: keras.Model, calls: Sequence[Call], places: Sequence[int]
) -> list[Section]:
    """Cuts a model into sections.

    Args:
        model: A graph of layers.
        calls: Its calls, as `calls_of` returns them.
        places: The calls at which sections begin, but the first one; ascending.

    Raises:
        UsageError: A mask would be lost.
    """
    bounds = [0, *places, len(calls)]
    sections: list[Section] = []
    for place in places:
        if any(map(is_masked, crossing(model, calls[:place], calls[place:]))):
            raise UsageError(
                f"--sections: a mask crosses the boundary before "
                f"{calls[place].operation.name}.\n"
                "Cut before the layer that makes it or after the last one that uses it."
            )
    for begin, end in itertools.pairwise(bounds):
        part = calls[begin:end]
        is_last = end == len(calls)
        outputs = model.outputs if is_last else crossing(model, part, calls[end:])
        known = {id(tensor): tensor for tensor in model.inputs}
        known |= {
            id(tensor): tensor
            for call in calls[:begin]
            for tensor in call.output_tensors
        }
        used = [tensor for call in part for tensor in call.input_tensors]
        inputs = {id(tensor): tensor for tensor in used if id(tensor) in known}
        counted = {id(v) for section in sections for v in section.trainable_variables}
        sections.append(
            Section(
                part, list(inputs.values()), outputs, counted, recomputed=not is_last
            )
        )
    return sections


def places_before(calls: Sequence[Call], names: Sequence[str]) -> list[int]:
    """Returns where sections begin that are named by their first layers.

    Args:
        calls: The calls of a model.
        names: Names of layers, or their beginnings up to `_` or `/`, such as `scale1`
            for `scale1_block0_conv1`.

    Raises:
        UsageError: There is no such layer.
    """
    places = set()
    for name in names:
        known = [call.operation.name for call in calls]
        exact = [place for place, layer in enumerate(known) if layer == name]
        under = [
            place
            for place, layer in enumerate(known)
            if layer.startswith((f"{name}_", f"{name}/"))
        ]
        if not exact and not under:
            closest = difflib.get_close_matches(name, known, n=_SHOWN_NAMES, cutoff=0.0)
            raise UsageError(
                f"--sections: the model has no layer {name}.\nThe closest names are "
                f"{', '.join(dict.fromkeys(closest))}."
            )
        places.add((exact or under)[0])
    return sorted(places - {0})
