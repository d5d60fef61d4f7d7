"""Estimates the memory that a traced function needs, from its graph alone.

TensorFlow runs an operation when its inputs are ready, and frees a tensor after the
last operation that uses it. This walks through a graph in the same way, with the sizes
of tensors in place of tensors; nothing is computed and no memory is allocated.
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

# Operations whose result is their input under another name or shape.
_ALIASES = {
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "PreventGradient",
    "Reshape",
    "Squeeze",
    "StopGradient",
}

# Operations that return an argument, a constant or a variable: memory of the caller.
_FOREIGN = {"Const", "Placeholder", "ReadVariableOp"}

# Operations that write into an input that is not used any more, if it has the size of
# the result (`forward_input_or_allocate_output` in TensorFlow's kernels).
_OPERATORS = {"Add", "AddN", "AddV2", "BiasAdd", "DivNoNan", "Mul", "RealDiv", "Sub"}
_FUNCTIONS = {
    "Exp",
    "Log",
    "Maximum",
    "Minimum",
    "Neg",
    "Pow",
    "Rsqrt",
    "Sqrt",
    "Square",
}
_ACTIVATIONS = {"Elu", "LeakyRelu", "LogSoftmax", "Relu", "Sigmoid", "Softmax", "Tanh"}
_GRADIENTS = {"EluGrad", "LeakyReluGrad", "ReluGrad", "SigmoidGrad", "TanhGrad"}
_NORMALIZATIONS = {"FusedBatchNormGradV3", "FusedBatchNormV3", "RsqrtGrad"}
_IN_PLACE = _OPERATORS | _FUNCTIONS | _ACTIVATIONS | _GRADIENTS | _NORMALIZATIONS

_KINDS = ("cpu", "gpu")

# Size of a convolution's workspace to that of its tensors: oneDNN pads channels.
_PADDING = 1.2


def size(tensor: tf.Tensor | tf.TensorSpec) -> int:
    """Returns the bytes of a tensor; 0 if its shape or type does not say."""
    count = tensor.shape.num_elements()
    if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return count * tensor.dtype.size


def on(kind: str, device: str) -> bool:
    """Returns whether a device is a `cpu` or `gpu`; an empty name may be either."""
    return not device or f":{kind}:" in f":{device.lower().lstrip('/')}:"


def root(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that owns the memory of a tensor."""
    while tensor.op.type in _ALIASES:
        source = tensor.op.inputs[0]
        if not any(
            on(kind, tensor.device) and on(kind, source.device) for kind in _KINDS
        ):
            break  # A copy from one device to another.
        tensor = source
    return tensor


def peak(graph: tf.Graph, outputs: Iterable[tf.Tensor], kind: str = "cpu") -> int:
    """Returns the peak memory of a function's tensors while its graph runs.

    It counts the bytes on one kind of device, `cpu` or `gpu`: those of its outputs,
    which are kept to the end, but not those of its arguments, variables and constants.
    """
    outputs = list(outputs)
    needed = _needed(graph, outputs)
    buffers = _Buffers(needed, outputs, kind)
    waiting = {op: len({*_inputs(op)}) for op in needed}
    users = collections.defaultdict(list)
    for op in needed:
        for source in {*_inputs(op)}:
            users[source].append(op)
    # First come, first served, as in TensorFlow's executor.
    ready = collections.deque(op for op in needed if not waiting[op])
    while ready:
        op = ready.popleft()
        buffers.run(op)
        for user in users[op]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return buffers.peak


def _inputs(op: tf.Operation) -> Iterable[tf.Operation]:
    yield from (tensor.op for tensor in op.inputs)
    yield from op.control_inputs


def _needed(graph: tf.Graph, outputs: list[tf.Tensor]) -> list[tf.Operation]:
    """Returns the operations that the outputs depend on, in the order of the graph."""
    stack = [tensor.op for tensor in outputs]
    found = set(stack)
    while stack:
        for source in _inputs(stack.pop()):
            if source not in found:
                found.add(source)
                stack.append(source)
    return [op for op in graph.get_operations() if op in found]


def _body(op: tf.Operation) -> tf.Graph | None:
    """Returns the graph of the function that an operation calls, if it is a call."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    return op.graph._get_function(op.get_attr("f").name).graph  # noqa: SLF001


def workspace(graph: tf.Graph, outputs: Iterable[tf.Tensor]) -> int:
    """Returns the bytes of the kernels' workspace.

    As measured on CPUs, it is a copy of what the gradient of the largest convolution
    with respect to its input reads and writes (`docs/lab-notes.md`).
    """
    largest = 0
    for op in _needed(graph, list(outputs)):
        body = _body(op)
        if body is not None:
            largest = max(largest, workspace(body, body.outputs))
        if op.type == "Conv2DBackpropInput":
            read_and_written = size(op.inputs[-1]) + size(op.outputs[0])
            largest = max(largest, int(_PADDING * read_and_written))
    return largest


def num_operations(graph: tf.Graph) -> int:
    """Returns the number of operations, each called function's counted once.

    Those of the update are left out, as when their memory was measured.
    """
    counted = [op for op in graph.get_operations() if not op.name.startswith("update/")]
    bodies = {id(body): body for op in counted if (body := _body(op))}
    return len(counted) + sum(map(num_operations, bodies.values()))


def multiplications(graph: tf.Graph, ends: Sequence[int]) -> list[int]:
    """Returns each part's multiplications, in convolutions and matrix products.

    `ends` are the numbers of operations in the graph after each part.
    """
    operations = graph.get_operations()
    return [
        sum(map(_multiplications, operations[begin:end]))
        for begin, end in itertools.pairwise([0, *ends])
    ]


def _multiplications(op: tf.Operation) -> int:
    if op.type not in ("Conv2D", "DepthwiseConv2dNative", "MatMul", "BatchMatMulV2"):
        return 0
    outputs = op.outputs[0].shape.num_elements()
    # Each element of the result is a sum of this many products.
    if "Conv" in op.type:
        height, width, channels, _ = op.inputs[1].shape
        products = height * width * (channels if op.type == "Conv2D" else 1)
    else:
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        products = op.inputs[0].shape[-2 if transposed else -1]
    return (outputs or 0) * (products or 0)


def kept(
    graph: tf.Graph, outputs: Iterable[tf.Tensor], ends: Sequence[int]
) -> list[int]:
    """Returns how many bytes each part of a graph keeps for what follows all parts.

    These are its tensors that operations after all parts use, as far as the `outputs`
    depend on them. `ends` is as for `multiplications`.
    """
    part_of: dict[tf.Operation, int] = {}
    operations = graph.get_operations()
    for part, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        part_of |= dict.fromkeys(operations[begin:end], part)
    used: dict[str, tf.Tensor] = {}
    for op in _needed(graph, list(outputs)):
        if op not in part_of:
            for tensor in op.inputs:
                used[root(tensor).name] = root(tensor)
    sums = [0] * len(ends)
    for tensor in used.values():
        if tensor.op in part_of and tensor.op.type not in _FOREIGN:
            sums[part_of[tensor.op]] += size(tensor)
    return sums


class _Buffers:
    """The memory behind the tensors of a graph while it runs."""

    def __init__(
        self, ops: list[tf.Operation], outputs: list[tf.Tensor], kind: str
    ) -> None:
        self.peak = 0
        self._kind = kind
        self._used = 0
        self._buffer: dict[str, int] = {}  # Of a tensor, by name.
        self._bytes: list[int] = []
        self._references: list[int] = []
        self._uses = collections.Counter(t.name for op in ops for t in op.inputs)
        self._uses.update(tensor.name for tensor in outputs)

    def run(self, op: tf.Operation) -> None:
        """Allocates what an operation returns and frees what is not used any more."""
        body = _body(op)
        buffers = self._returned(op) if body is None else self._called(body)
        for tensor, buffer in zip(op.outputs, buffers, strict=True):
            self._buffer[tensor.name] = buffer
            # One reference more until the operation has run.
            self._references[buffer] += self._uses[tensor.name] + 1
        for tensor in [*op.inputs, *op.outputs]:
            self._release(self._buffer[tensor.name])

    def _returned(self, op: tf.Operation) -> Iterator[int]:
        foreign = op.type in _FOREIGN or not on(self._kind, op.device)
        for tensor in op.outputs:
            buffer = None
            if op.type in _ALIASES and root(tensor) is not tensor:
                buffer = self._buffer[op.inputs[0].name]
            elif op.type in _IN_PLACE and tensor is op.outputs[0]:
                buffer = self._forwarded(op, size(tensor))
            if buffer is None:
                buffer = self._allocate(0 if foreign else size(tensor))
            yield buffer

    def _called(self, body: tf.Graph) -> Iterator[int]:
        """Runs a function; its outputs that share memory there share a buffer."""
        inner = peak(body, body.outputs, self._kind)
        self.peak = max(self.peak, self._used + inner)
        buffers: dict[str, int] = {}
        for tensor in body.outputs:
            source = root(tensor)
            if source.name not in buffers:
                counted = on(self._kind, source.device)
                buffers[source.name] = self._allocate(size(tensor) if counted else 0)
            yield buffers[source.name]

    def _forwarded(self, op: tf.Operation, wanted: int) -> int | None:
        for tensor in op.inputs:
            buffer = self._buffer[tensor.name]
            last_use = self._references[buffer] == 1
            if last_use and self._bytes[buffer] == wanted:
                return buffer
        return None

    def _allocate(self, wanted: int) -> int:
        self._bytes.append(wanted)
        self._references.append(0)
        self._used += wanted
        self.peak = max(self.peak, self._used)
        return len(self._bytes) - 1

    def _release(self, buffer: int) -> None:
        self._references[buffer] -= 1
        if not self._references[buffer]:
            self._used -= self._bytes[buffer]
