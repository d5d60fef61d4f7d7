"""Cuts a model into sections, which a tower computes one after another.

As in PartialFlow (https://github.com/jakob-bauer/partialflow), memory keeps only the
boundary tensors between sections. Each section recomputes all other activations when
its gradients are computed. `sectioned_tower.py` computes the sections.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers.copies import Tensors

# Operations that TensorFlow marks as stateful although they can be repeated: they only
# read, or always compute the same. (Keras uses CudnnRNNV3 without dropout.)
_REPEATABLE = {
    *("Assert", "CudnnRNNV3", "PrintV2", "ReadVariableOp"),
    *("ResourceGather", "ResourceGatherNd", "VarHandleOp"),
}

# A call of a layer or operation in a model's graph: a Keras node with the attributes
# `operation`, `arguments`, `input_tensors` and `output_tensors`.
Call: TypeAlias = Any
Calls: TypeAlias = Sequence[Call]


class Section(keras.layers.Layer):
    """Runs consecutive layer calls of a model, with the model's variables.

    Inputs and outputs are lists of tensors. `later` has all later sections' calls.
    """

    def __init__(self, model: keras.Model, calls: Calls, later: Calls) -> None:
        super().__init__(autocast=False, name="section")
        self.model = model
        self.calls = tuple(calls)
        own = {id(tensor) for call in calls for tensor in call.output_tensors}
        used = {id(one): one for call in calls for one in call.input_tensors}
        # Tensors from earlier sections or the model's inputs.
        self.input_tensors = tuple(used[key] for key in used if key not in own)
        # Tensors for later sections, or the model's output.
        self.output_tensors = tuple(crossing(model, calls, later))
        # For each input tensor, whether it is from an earlier section. The gradients of
        # the model's inputs take time and are not needed.
        model_inputs = {*map(id, model.inputs)}
        self.from_sections = [id(one) not in model_inputs for one in self.input_tensors]
        self.recomputed = bool(later)  # Whether gradients need another forward pass.
        self.ends: list[int] = []  # Operations in the graph once each call is traced.
        self.built = True

    def call(self, inputs: Tensors, training: bool | None = None) -> Tensors:
        """Runs the section's layer calls, as the whole model would run them."""
        taken = zip(self.input_tensors, inputs, self.from_sections, strict=True)
        values = {
            # A model casts its inputs to their declared dtypes.
            id(tensor): value if from_section else tf.cast(value, tensor.dtype)
            for tensor, value, from_section in taken
        }
        graph = tf.compat.v1.get_default_graph()
        self.ends = []
        for call in self.calls:
            begin = len(graph.get_operations())
            args, kwargs = call.arguments.fill_in(values)
            if "training" in kwargs:  # Other layers inherit it.
                kwargs["training"] = training
            outputs = tf.nest.flatten(call.operation(*args, **kwargs))
            values |= zip(map(id, call.output_tensors), outputs, strict=True)
            if self.recomputed:
                _check_repeatable(call, graph.get_operations()[begin:])
            self.ends.append(len(graph.get_operations()))
        return [values[id(tensor)] for tensor in self.output_tensors]


def _check_repeatable(call: Call, operations: Sequence[tf.Operation]) -> None:
    """Refuses a call whose operations change state or draw random numbers."""
    stateful = {op.type for op in operations if op.op_def.is_stateful} - _REPEATABLE
    if stateful:
        raise UsageError(
            f"--sections: layer {call.operation.name} cannot be recomputed: "
            f"{', '.join(sorted(stateful))} would give other values the second time. "
            "Draw random numbers with keras.random and a SeedGenerator, keep state in "
            "variables of the layer, or make this layer part of the last section."
        )


def calls_of(model: keras.Model) -> list[Call]:
    """Returns all calls in a model's graph, in topological order."""
    # In Keras's order, which has no public name, because stateful layers on several
    # branches must advance their state in the same order.
    by_depth = getattr(model, "_functional", model)._nodes_by_depth  # noqa: SLF001
    nodes = (node for depth in sorted(by_depth)[::-1] for node in by_depth[depth])
    return [node for node in nodes if not node.is_input]


def crossing(model: keras.Model, early: Calls, later: Calls) -> list[keras.KerasTensor]:
    """Returns those outputs of the calls in `early` that the calls in `later` need.

    `later` holds all later calls. An output of the model counts as needed.
    """
    needed = {id(tensor) for call in later for tensor in call.input_tensors}
    needed.update(map(id, model.outputs))
    outputs = (tensor for call in early for tensor in call.output_tensors)
    return [tensor for tensor in outputs if id(tensor) in needed]


def cut(model: keras.Model, starts: Sequence[int]) -> list[Section]:
    """Cuts a graph of layers into sections.

    `starts` are the ascending indices in `calls_of(model)` at which all sections but
    the first begin. Without starts, the whole model is one section.
    """
    calls = calls_of(model)
    bounds = itertools.pairwise([0, *starts, len(calls)])
    return [Section(model, calls[begin:end], calls[end:]) for begin, end in bounds]
