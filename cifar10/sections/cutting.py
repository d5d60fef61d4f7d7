"""Cuts a model into sections, which a tower computes one after another.

PartialFlow's idea (https://github.com/jakob-bauer/partialflow): of all activations only
the boundary tensors between sections are kept, and a section recomputes the others when
its gradients are due. `sectioned_tower.py` computes the sections.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.errors import UsageError, did_you_mean
from cifar10.models.layer_tree import is_graph, same_but_number

# Operations that TensorFlow calls stateful although they only read, or compute the same
# every time; Keras gives CudnnRNNV3 no dropout.
_REPEATABLE = {
    "Assert",
    "CudnnRNNV3",
    "PrintV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarHandleOp",
}

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
        model_inputs: Ids of the model's inputs.
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
        *,
        model_inputs: Collection[int],
        counted: Collection[int] = (),
        recomputed: bool = False,
    ) -> None:
        super().__init__(autocast=False, name="section")
        self.calls = tuple(calls)
        self.input_tensors = tuple(input_tensors)
        self.output_tensors = tuple(output_tensors)
        # The gradients of a model's inputs are not needed, and they take time.
        self.from_sections = tuple(id(one) not in model_inputs for one in input_tensors)
        self.counted = frozenset(counted)
        self.recomputed = recomputed
        self.ends: list[int] = []
        operations = (call.operation for call in calls)
        self.parts = [one for one in operations if isinstance(one, keras.layers.Layer)]
        self.built = True

    def call(
        self, inputs: list[tf.Tensor], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Makes the calls as the model does."""
        values = {
            # A model casts its inputs to the type that it declares for them.
            id(tensor): value if from_section else tf.cast(value, tensor.dtype)
            for tensor, value, from_section in zip(
                self.input_tensors, inputs, self.from_sections, strict=True
            )
        }
        graph = tf.compat.v1.get_default_graph()
        self.ends = []
        for call in self.calls:
            begin = len(graph.get_operations())
            args, kwargs = call.arguments.fill_in(values)
            if "training" in kwargs:  # A layer without it takes this call's.
                kwargs["training"] = training
            outputs = tf.nest.flatten(call.operation(*args, **kwargs))
            values |= zip(map(id, call.output_tensors), outputs, strict=True)
            if self.recomputed:
                _check_repeatable(call, graph.get_operations()[begin:])
            self.ends.append(len(graph.get_operations()))
        return [values[id(tensor)] for tensor in self.output_tensors]


def _check_repeatable(call: Call, operations: Sequence[tf.Operation]) -> None:
    """Refuses a call whose operations change a state or draw random numbers."""
    stateful = {op.type for op in operations if op.op_def.is_stateful} - _REPEATABLE
    if stateful:
        raise UsageError(
            f"--sections: layer {call.operation.name} cannot be computed twice: the "
            f"second time {', '.join(sorted(stateful))} would compute something else.\n"
            "Draw random numbers with keras.random and a SeedGenerator, keep state in "
            "variables of the layer, or leave it to the last section."
        )


def graph_of(model: keras.Model, image_shape: Sequence[int]) -> keras.Model:
    """Returns a model as a graph of layers with one output.

    A model of another class becomes the only layer of one, and so cannot be cut.
    """
    if is_graph(model) and len(model.outputs) == 1:
        return model
    images = keras.Input(image_shape)
    return keras.Model(images, model(images))


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a graph's layers, each after those whose outputs it uses."""
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


def cut(model: keras.Model, places: Sequence[int]) -> list[Section]:
    """Cuts a graph of layers into sections; without places the whole model is one.

    Each section but the first begins at one of the calls at `places` of `calls_of`,
    which are ascending.

    Raises:
        UsageError: A mask crosses a boundary.
    """
    calls = calls_of(model)
    for place in places:
        if any(map(is_masked, crossing(model, calls[:place], calls[place:]))):
            raise UsageError(
                f"--sections: a mask crosses the boundary before "
                f"{calls[place].operation.name}.\n"
                "Cut before the layer that makes it or after the last one that uses it."
            )
    sections: list[Section] = []
    model_inputs = {*map(id, model.inputs)}
    known = {id(tensor): tensor for tensor in model.inputs}
    for begin, end in itertools.pairwise([0, *places, len(calls)]):
        part = calls[begin:end]
        used = dict.fromkeys(id(one) for call in part for one in call.input_tensors)
        sections.append(
            Section(
                part,
                [known[key] for key in used if key in known],
                crossing(model, part, calls[end:]),
                model_inputs=model_inputs,
                counted={id(v) for one in sections for v in one.trainable_variables},
                recomputed=end < len(calls),
            )
        )
        known |= {id(one): one for call in part for one in call.output_tensors}
    return sections


def places_before(calls: Sequence[Call], names: Sequence[str]) -> list[int]:
    """Returns the places of the calls of the layers with some names.

    Keras numbers the names that it makes itself through a process, so a second model
    has other numbers: a name that no layer has is the first that differs in its number.

    Raises:
        UsageError: The model has no such layer.
    """
    known = [call.operation.name for call in calls]
    places = set()
    for name in names:
        numbered = (other for other in known if same_but_number(name, other))
        found = name if name in known else next(numbered, None)
        if found is None:
            raise UsageError(
                f"--sections: the model has no layer {name}.{did_you_mean(name, known)}"
                "\nThe model's summary() lists its layers."
            )
        places.add(known.index(found))
    return sorted(places)
