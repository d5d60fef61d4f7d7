"""Whether operations of a graph compute the same whenever they are run."""

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


def impure(graph: tf.Graph, operations: Sequence[tf.Operation]) -> set[str]:
    """Returns the types of operations that change a state or draw random numbers.

    Args:
        graph: A graph.
        operations: Those of its operations that are meant, and the functions they call.
    """
    stateful = [op for op in operations if _is_stateful(op.type)]
    if not any(_called(op.node_def) for op in stateful):
        return {op.type for op in stateful}
    library = {
        function.signature.name: function.node_def
        for function in graph.as_graph_def().library.function
    }
    found = set()
    waiting = [op.node_def for op in stateful]
    while waiting:
        node = waiting.pop()
        inner = [one for name in _called(node) for one in library.pop(name, ())]
        waiting += [one for one in inner if _is_stateful(one.op)]
        if not list(_called(node)):
            found.add(node.op)
    return found


def _is_stateful(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    return kind not in _HARMLESS and (definition is None or definition.is_stateful)


def _called(node: object) -> Iterator[str]:
    """Yields the names of the functions that an operation calls."""
    for value in node.attr.values():  # type: ignore[attr-defined]
        yield from [value.func.name] if value.func.name else []
        yield from (function.name for function in value.list.func)
