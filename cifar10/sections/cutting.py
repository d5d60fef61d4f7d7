"""Sections: parts of a model that a tower computes one after another.

PartialFlow's idea (https://github.com/jakob-bauer/partialflow): of all activations only
the boundary tensors between sections are kept, and a section recomputes the others when
its gradients are due. Here a model is cut; `sectioned_tower.py` orders the parts.
"""

import difflib
import itertools
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.models import registry
from cifar10.sections import statefulness

_SHOWN_NAMES = 5

# A call of a layer or operation in a model's graph: a node of Keras, which has the
# `operation`, the `arguments`, the `input_tensors` and the `output_tensors`.
Call: TypeAlias = Any


class Section(keras.layers.Layer):
    """Some calls of a model as a layer, which shares the model's variables.

    Both its inputs and its outputs are lists of tensors.

    Args:
        calls: The calls, in their order.
        input_tensors: The tensors of earlier sections, or the model's inputs.
        output_tensors: The tensors that later sections use, or the model's output.
        counted: Ids of the variables whose weight decay an earlier section counts.
        recomputed: Whether its forward pass runs once more for its gradients.

    Attributes:
        from_sections: Whether each input tensor comes from an earlier section.
        ends: The number of operations in the graph after each call, when last traced.
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
        self.ends: list[int] = []
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
        graph = tf.compat.v1.get_default_graph()
        self.ends = []
        for call in self.calls:
            begin = len(graph.get_operations())
            args, kwargs = call.arguments.fill_in(values)
            if "training" in getattr(call.operation, "_call_context_args", ()):
                kwargs["training"] = training
            outputs = tf.nest.flatten(call.operation(*args, **kwargs))
            values |= zip(map(id, call.output_tensors), outputs, strict=True)
            if self.recomputed:
                _check_repeatable(call, graph, graph.get_operations()[begin:])
            self.ends.append(len(graph.get_operations()))
        return [values[id(tensor)] for tensor in self.output_tensors]

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
    """A model as its only section, whether or not it is a graph of layers."""

    def __init__(self, model: keras.Model) -> None:
        input_tensors = model.inputs if registry.is_graph(model) else [object()]
        super().__init__((), input_tensors, ())
        self.parts = [model]

    def call(
        self, inputs: list[tf.Tensor], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Calls the model."""
        return [self.parts[0](*inputs, training=training)]


def _check_repeatable(
    call: Call, graph: tf.Graph, operations: Sequence[tf.Operation]
) -> None:
    if types := statefulness.stateful_types(graph, operations):
        raise UsageError(
            f"--sections: layer {call.operation.name} cannot be computed twice: the "
            f"second time {', '.join(sorted(types))} would compute something else.\n"
            "Draw random numbers with keras.random and a SeedGenerator, keep state in "
            "variables of the layer, or leave it to the last section."
        )


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a model's layers, each after those whose outputs it uses."""
    if not registry.is_graph(model) or len(model.outputs) != 1:
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
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if not node.is_input
    ]


def crossing(
    model: keras.Model, before: Sequence[Call], after: Sequence[Call]
) -> list[keras.KerasTensor]:
    """Returns the tensors of some calls that later calls, or the output, use.

    The model's inputs are not among them; `after` holds all later calls.
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
    """Returns whether a tensor has a mask, which cannot cross a boundary."""
    return getattr(tensor, "_keras_mask", None) is not None


def _is_input(tensor: object) -> bool:
    if not isinstance(tensor, keras.KerasTensor):
        return True  # A subclassed model has no symbolic inputs.
    operation = tensor._keras_history.operation  # noqa: SLF001 - as in `calls_of`.
    return isinstance(operation, keras.layers.InputLayer)


def cut(
    model: keras.Model, calls: Sequence[Call], places: Sequence[int]
) -> list[Section]:
    """Cuts a model, whose calls `calls_of` has returned, into sections.

    Sections but the first one begin at the calls at `places`, which are ascending.
    """
    for place in places:
        if any(map(is_masked, crossing(model, calls[:place], calls[place:]))):
            raise UsageError(
                f"--sections: a mask crosses the boundary before "
                f"{calls[place].operation.name}.\n"
                "Cut before the layer that makes it or after the last one that uses it."
            )
    sections: list[Section] = []
    known = {id(tensor) for tensor in model.inputs}
    for begin, end in itertools.pairwise([0, *places, len(calls)]):
        part = calls[begin:end]
        inputs = {
            id(tensor): tensor
            for call in part
            for tensor in call.input_tensors
            if id(tensor) in known
        }
        sections.append(
            Section(
                part,
                list(inputs.values()),
                crossing(model, part, calls[end:]),
                {id(v) for section in sections for v in section.trainable_variables},
                recomputed=end < len(calls),
            )
        )
        known |= {id(tensor) for call in part for tensor in call.output_tensors}
    return sections


def places_before(calls: Sequence[Call], names: Sequence[str]) -> list[int]:
    """Returns where sections begin that are named by their first layers.

    A name may be the beginning of one, up to `_` or `/`: `scale1` stands for
    `scale1_block0_conv1`.
    """
    known = [call.operation.name for call in calls]
    places = set()
    for name in names:
        under = [layer for layer in known if layer.startswith((f"{name}_", f"{name}/"))]
        if name not in known and not under:
            closest = difflib.get_close_matches(name, known, n=_SHOWN_NAMES, cutoff=0.0)
            raise UsageError(
                f"--sections: the model has no layer {name}.\nThe closest names are "
                f"{', '.join(dict.fromkeys(closest))}."
            )
        places.add(known.index(name if name in known else under[0]))
    return sorted(places)
