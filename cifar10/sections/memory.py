"""How much memory a traced function takes, and how much there is.

TensorFlow runs an operation when its inputs are ready, and frees a tensor after the
last operation that uses it. `peak` walks through a graph in the same way, with the
sizes of tensors in place of tensors; nothing is computed and no memory is allocated.
"""

import collections
import ctypes
import itertools
import math
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import tensorflow as tf

from cifar10.towers import hardware, split_gpus
from cifar10.towers.devices import Placement

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
_IN_PLACE = {"Add", "AddN", "AddV2", "BiasAdd", "FusedBatchNormV3", "Mul", "RealDiv"}
_IN_PLACE |= {"FusedBatchNormGradV3", "Relu", "ReluGrad", "Rsqrt", "RsqrtGrad", "Sub"}
_IN_PLACE |= {"Exp", "Log", "Neg", "Pow", "Sqrt", "Square", "Tanh", "TanhGrad"}

# Size of a convolution's workspace to that of its tensors: oneDNN pads channels.
_PADDING = 1.2

_M_MMAP_THRESHOLD = -3  # In glibc's malloc.h.


def size(tensor: tf.Tensor | tf.TensorSpec | tf.Variable) -> int:
    """Returns the bytes of a tensor; 0 if its shape or type does not say."""
    count = tensor.shape.num_elements()
    if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return count * tensor.dtype.size


def peak(graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> int:
    """Returns the peak memory of a function's tensors while its graph runs.

    It counts the bytes of its outputs, which are kept to the end, but not those of its
    arguments, of variables and of constants; of functions that it calls, it counts the
    outputs alone.
    """
    needed = _needed(graph, outputs)
    users = collections.defaultdict(list)
    waiting = {}
    for op in needed:
        sources = {*_sources(op)}
        waiting[op] = len(sources)
        for source in sources:
            users[source].append(op)
    uses = collections.Counter(_owner(t).name for op in needed for t in op.inputs)
    uses.update(_owner(tensor).name for tensor in outputs)
    used = most = 0
    # First come, first served, as in TensorFlow's executor.
    ready = collections.deque(op for op in needed if not waiting[op])
    while ready:
        op = ready.popleft()
        used += sum(map(_allocated, op.outputs))
        unused = [tensor for tensor in op.outputs if not uses[_owner(tensor).name]]
        for tensor in map(_owner, op.inputs):
            uses[tensor.name] -= 1
            if not uses[tensor.name]:
                unused.append(tensor)
        sizes = [_allocated(tensor) for tensor in unused]
        result = _allocated(op.outputs[0]) if op.type in _IN_PLACE else 0
        most = max(most, used - (result if result in sizes else 0))
        used -= sum(sizes)
        for user in users[op]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return most


def kept(
    graph: tf.Graph, outputs: Sequence[tf.Tensor], ends: Sequence[int]
) -> list[int]:
    """Returns how many bytes each part of a graph keeps for what follows all parts.

    These are its tensors that operations after all parts use, as far as the `outputs`
    depend on them. `ends` are the numbers of operations in the graph after each part.
    """
    part_of: dict[tf.Operation, int] = {}
    operations = graph.get_operations()
    for part, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        part_of |= dict.fromkeys(operations[begin:end], part)
    used = {
        owner.name: owner
        for op in _needed(graph, outputs)
        if op not in part_of
        for owner in map(_owner, op.inputs)
    }
    sums = [0] * len(ends)
    for tensor in used.values():
        if tensor.op in part_of:
            sums[part_of[tensor.op]] += _allocated(tensor)
    return sums


def workspace(graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> int:
    """Returns the bytes of the kernels' workspace.

    As measured on CPUs, it is a copy of what the gradient of the largest convolution
    with respect to its input reads and writes (`docs/lab-notes.md`).
    """
    read_and_written = [
        size(op.inputs[-1]) + size(op.outputs[0])
        for op in _needed(graph, outputs)
        if op.type == "Conv2DBackpropInput"
    ]
    return int(_PADDING * max(read_and_written, default=0))


def _sources(op: tf.Operation) -> Iterable[tf.Operation]:
    yield from (tensor.op for tensor in op.inputs)
    yield from op.control_inputs


def _needed(graph: tf.Graph, outputs: Iterable[tf.Tensor]) -> list[tf.Operation]:
    """Returns the operations that the outputs depend on, in the order of the graph."""
    stack = [tensor.op for tensor in outputs]
    found = set(stack)
    while stack:
        new = {*_sources(stack.pop())} - found
        found |= new
        stack += new
    return [op for op in graph.get_operations() if op in found]


def _owner(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that owns the memory of a tensor."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def _allocated(tensor: tf.Tensor) -> int:
    """Returns the bytes that an operation allocates for its result."""
    return 0 if tensor.op.type in _ALIASES | _FOREIGN else size(tensor)


def free(placement: Placement) -> float:
    """Returns the free bytes of a GPU for its tower, or of the CPU for all towers.

    Infinite where that cannot be found out.
    """
    if placement.on_gpus:
        return min(_free_on_gpus()[name] for name in placement.devices)
    available = hardware.memory().available
    bounds = [math.inf if available is None else available]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        # TensorFlow's allocator reserves regions, each twice as large as the last.
        bounds.append((limit - pages * resource.getpagesize()) / 2)
    return min(bounds)


def _free_on_gpus() -> dict[str, float]:
    """Returns the free bytes of each GPU, or of each part of one, such as `/gpu:0`."""
    sizes: list[float] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu) or []
        limits = [part.memory_limit for part in parts]
        if any(limits):
            sizes += [megabytes * 2**20 for megabytes in limits]
        else:
            sizes.append(split_gpus.free_memory(gpu))
    return {f"/gpu:{number}": count for number, count in enumerate(sizes)}


def return_freed_blocks() -> None:
    """Lets blocks of 1 MB or more go back to the system when they are freed.

    Without oneDNN, which brings an allocator, tensors come from glibc. It keeps freed
    blocks of up to 32 MB, and the gaps between them fit no other tensor.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
