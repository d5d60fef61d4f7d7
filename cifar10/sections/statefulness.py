"""Finds operations that compute something else when they run a second time."""

from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

# TensorFlow calls them stateful, but they only read, or compute the same every time;
# Keras gives CudnnRNNV3 no dropout.
_HARMLESS = {
    "Assert",
    "CudnnRNNV3",
    "PrintV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarHandleOp",
}


def stateful_types(graph: tf.Graph, operations: Sequence[tf.Operation]) -> set[str]:
    """Returns the types of the operations that change a state or draw random numbers.

    The functions that these operations of a graph call are searched too.
    """
    types = set()
    for op in operations:
        definition = op_def_registry.get(op.type)
        if op.type in _HARMLESS or (definition and not definition.is_stateful):
            continue
        called = list(_called(op.node_def))
        if not called:
            types.add(op.type)
        for name in called:
            body = graph._get_function(name).graph  # noqa: SLF001
            types |= stateful_types(body, body.get_operations())
    return types


def _called(node: object) -> Iterator[str]:
    """Yields the names of the functions that an operation calls."""
    for value in node.attr.values():  # type: ignore[attr-defined]
        yield from [value.func.name] if value.func.name else []
        yield from (function.name for function in value.list.func)
