"""How much memory the tensors of a traced function take, and how much there is."""

import contextlib
import ctypes
import itertools
import math
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers import devices, hardware
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
# Size of a convolution's workspace to that of its tensors: oneDNN pads channels.
_PADDING = 1.2

_M_MMAP_THRESHOLD = -3  # In glibc's malloc.h.


def size(tensor: tf.Tensor | tf.TensorSpec | tf.Variable) -> int:
    """Returns the bytes of a tensor; 0 if its shape or type does not say."""
    count = tensor.shape.num_elements()
    if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return count * tensor.dtype.size


class Costs(NamedTuple):
    """The costs of a model with its loss and their gradients, read from the graph."""

    kept: list[int]  # Bytes that each call keeps for the gradients.
    # Bytes of the kernels' workspace. As measured on CPUs, it is a copy of what the
    # gradient of the largest convolution with respect to its input reads and writes.
    workspace: int
    convolutions: int  # Operations that compute one, or its gradients.


def costs(graph: tf.Graph, outputs: Sequence[tf.Tensor], ends: Sequence[int]) -> Costs:
    """Returns the costs of a graph in parts, as far as the outputs depend on them.

    A part keeps its tensors that operations after all parts use. `ends` are the numbers
    of operations in the graph after each part.
    """
    operations = graph.get_operations()
    part_of: dict[tf.Operation, int] = {}
    for part, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        part_of |= dict.fromkeys(operations[begin:end], part)
    needed = _needed(outputs)
    used = {
        owner.name: owner
        for op in needed - part_of.keys()
        for owner in map(_owner, op.inputs)
    }
    kept = [0] * len(ends)
    for tensor in used.values():
        if tensor.op in part_of and tensor.op.type not in _FOREIGN:
            kept[part_of[tensor.op]] += size(tensor)
    read_and_written = [
        size(op.inputs[-1]) + size(op.outputs[0])
        for op in needed
        if op.type == "Conv2DBackpropInput"
    ]
    return Costs(
        kept,
        int(_PADDING * max(read_and_written, default=0)),
        sum("Conv" in op.type for op in needed),
    )


def _needed(outputs: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations that the outputs depend on."""
    stack = [tensor.op for tensor in outputs]
    found = set(stack)
    while stack:
        op = stack.pop()
        sources = {*op.control_inputs, *(tensor.op for tensor in op.inputs)} - found
        found |= sources
        stack += sources
    return found


def _owner(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that owns the memory of a tensor."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


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
            continue
        sizes.append(math.inf)
        with contextlib.suppress(OSError, UsageError):  # Its driver does not say.
            sizes[-1] = devices.free_memory(gpu)
    return {f"/gpu:{number}": count for number, count in enumerate(sizes)}


def return_freed_blocks() -> None:
    """Lets blocks of 1 MB or more go back to the system when they are freed.

    Without oneDNN, which brings an allocator, tensors come from glibc. It keeps freed
    blocks of up to 32 MB, and the gaps between them fit no other tensor.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
