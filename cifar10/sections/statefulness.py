"""Finds operations that compute something else when they run a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

# TensorFlow calls them stateful, but they read only, or compute the same every time;
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

    Args:
        graph: A graph.
        operations: Some of its operations; the functions they call are searched too.
    """
    stateful = [op for op in operations if _is_stateful(op.type)]
    if not any(_called(op.node_def) for op in stateful):
        return {op.type for op in stateful}
    library = {
        function.signature.name: function.node_def
        for function in graph.as_graph_def().library.function
    }
    types = set()
    pending = [op.node_def for op in stateful]
    while pending:
        node = pending.pop()
        called = list(_called(node))
        if not called:
            types.add(node.op)
        for name in called:
            body = library.pop(name, ())
            pending += [inner for inner in body if _is_stateful(inner.op)]
    return types


def _is_stateful(op_type: str) -> bool:
    definition = op_def_registry.get(op_type)
    return op_type not in _HARMLESS and (definition is None or definition.is_stateful)


def _called(node: object) -> Iterator[str]:
    """Yields the names of the functions that an operation calls."""
    for value in node.attr.values():  # type: ignore[attr-defined]
        yield from [value.func.name] if value.func.name else []
        yield from (function.name for function in value.list.func)
