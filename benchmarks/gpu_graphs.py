"""Counts what a step does on GPUs, without one: operations, kernels and copies.

    python -m benchmarks.gpu_graphs

TensorFlow's wheels for Linux register their GPU kernels even without a GPU, and its
graph optimizer accepts a description in place of a GPU. What XLA makes of a program is
seen from its passes for CPUs, because those for GPUs need a GPU.
"""

from __future__ import annotations

import collections
import functools
import re
import types
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import (
    config_pb2,
    device_properties_pb2,
    meta_graph_pb2,
    rewriter_config_pb2,
)
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.grappler import cluster, tf_optimizer
from tensorflow.python.ops import handle_data_util
from tensorflow.python.training import saver

from cifar10.config.augmentation import mixes
from cifar10.config.config import Config, ResolvedConfig
from cifar10.distributed.workers import Workers
from cifar10.input import distortions, on_device
from cifar10.input.pipeline import BatchMaker
from cifar10.process import entry_point
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Batch, TowerBuilder
from cifar10.training import assembly

HOST = "/device:CPU:0"

# Arguments and results of a function, which are not placed.
_NOT_PLACED = {"Placeholder", "_Arg", "_Retval"}
# The `If` of an update, which undoes it, calls nothing in most steps.
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "StatelessIf", "While"}
_OF_VARIABLES = {
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
}
# What computes nothing: shapes of the same memory, and memory that is there already.
_FREE = {
    *("Const", "Placeholder", "_Retval", "NoOp", "If", "Switch", "Merge"),
    *("Identity", "IdentityN", "StopGradient", "Reshape", "ExpandDims", "Squeeze"),
    *("ReadVariableOp", "AssignVariableOp"),
}

BATCH_SIZE = 128
# By name: the number of GPUs, and arguments of `Config`.
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "tutorial": (1, {}),
    "tutorial on 4 GPUs": (4, {}),
    "fast": (1, {"recipe": "fast", "batch_size": 1000}),
    "resnet": (1, {"recipe": "resnet", "batch_size": BATCH_SIZE}),
}
for _name in ("tutorial", "fast", "resnet"):
    STEPS[f"{_name}, update by XLA"] = 1, {**STEPS[_name][1], "xla_update": True}
PROGRAMS = ("tutorial", "fast", "resnet")


# ---- a step


def resolved(gpus: int, **given: Any) -> tuple[ResolvedConfig, Placement]:
    """Returns the configuration of a run on some GPUs, with their placement."""
    placement = Placement(tuple(f"/gpu:{number}" for number in range(gpus)), False, "")
    config = Config(**{"batch_size": BATCH_SIZE, **given})
    return assembly.resolve_config(config, placement, workers=1), placement


def build_towers(
    gpus: int, images: np.ndarray, **given: Any
) -> tuple[TowerBuilder, list[Batch]]:
    """Builds the towers of a run on GPUs; returns them and the specs of their batches.

    The code sees GPUs; the variables themselves are on the CPU.
    """
    config, placement = resolved(gpus, **given)
    replicas = gpus if config.batch.variable_update == "mirrored" else 1
    states = assembly.build_states(
        config, placement, replicas, types.SimpleNamespace(classes=10), images[:64]
    )
    towers, *_ = assembly.build_towers(
        config, placement, states, None, Workers(), images, classes=10
    )
    size = config.batch.batch_size
    shape = distortions.image_shape(config.images.distortions, images.shape[1:])
    labels = tf.TensorSpec([size], tf.int64)
    if mixes(config.images.augmentation):
        labels = tf.TensorSpec([size, 10])
    batch = tf.TensorSpec([size, *shape]), labels
    return towers, [batch] * len(towers.devices)


def trace_input(
    images: np.ndarray, maker: BatchMaker, size: int = BATCH_SIZE, steps: int = 1
) -> tf.types.experimental.ConcreteFunction:
    """Traces what makes the batches of some steps on a GPU from stored images."""
    made: list[Any] = []
    function = tf.function

    def recorded(*arguments: Any, **options: Any) -> Any:
        made.append(function(*arguments, **options))
        return made[-1]

    labels = np.arange(len(images), dtype=np.int32) % 10
    with mock.patch.object(tf, "function", recorded):
        batches = on_device.device_batches(
            *(images, labels, maker),
            devices=["/gpu:0"],
            batch_size=size,
            start_step=0,
            most=steps,
        )
        next(batches)
    return made[0].get_concrete_function(tf.TensorSpec([], tf.int64))


class Counts(NamedTuple):
    """What a step does."""

    operations: int  # Visited by the host, on all devices.
    kernels: int  # Launched on GPUs, about: some operations launch several.
    copies: int  # Of tensors between two memories.
    to_host: int  # How many of them GPUs send to the host, which waits.
    megabytes: float  # Copied.
    input: float  # Kernels launched for the images of a step, in calls of `steps`.
    steps: int  # Of a call, by default.


def count_step(name: str) -> Counts:
    """Counts what a step of `STEPS` does."""
    gpus, given = STEPS[name]
    images = np.zeros([64, 32, 32, 3], np.uint8)
    visible = [types.SimpleNamespace(name=f"GPU:{n}") for n in range(gpus)]
    with mock.patch.object(tf.config, "get_visible_devices", return_value=visible):
        towers, batches = build_towers(gpus, images, precision="bfloat16", **given)
        function = towers.trace(batches)
    inputs = [device for device in towers.devices for _ in range(2)]
    home = towers.state.device
    optimized = _optimized(function, [*inputs, HOST], home, home, gpus)
    crossed = crossings(function, [*inputs, HOST], home, home, gpus)
    of_call, steps = _count_input(gpus, images.shape[1:], given)
    return Counts(
        len(optimized.node),
        _count_launched(optimized),
        len(crossed),
        sum(crossing.target == HOST for crossing in crossed),
        round(sum(crossing.bytes for crossing in crossed) / 1e6, 1),
        round(of_call * gpus / steps, 1),
        steps,
    )


def _count_launched(graph):
    return sum(
        _on_gpu(node.device) and node.op not in _FREE and {*memories(node)[1]} != {HOST}
        for node in graph.node
    )


def _count_input(gpus, shape, given):
    """Returns the kernels that make a call's batches on a GPU, and the call's steps."""
    config, placement = resolved(gpus, precision="bfloat16", **given)
    steps = assembly.default_steps_per_call(config, placement, shape)
    side = config.stage(0).image_size
    maker = BatchMaker(config.images.distortions, 0, image_size=side)
    function = trace_input(np.zeros([100, *shape], np.uint8), maker, 2, steps)
    made = _optimized(function, [HOST, "/gpu:0"], "/gpu:0", "/gpu:0", 1)
    return _count_launched(made), steps


class Program(NamedTuple):
    """What XLA makes of the steps of a call, on one GPU."""

    steps: int  # Of a call, by default.
    loops: int
    waits: int  # Conditions, of loops and branches, for which the host waits each time.
    scatters: int  # TensorFlow's gradients of max pooling, slow on GPUs.
    fusions: int  # Of elementwise operations, each started as a kernel.
    others: int  # Convolutions, products and calls of libraries.


def count_program(name: str) -> Program:
    """Counts what a program of `STEPS` holds after XLA's passes for CPUs."""
    gpus, given = STEPS[name]
    given = {**given, "precision": "bfloat16", "xla": True}
    images = np.zeros([64, 32, 32, 3], np.uint8)
    config, placement = resolved(gpus, **given)
    steps = assembly.default_steps_per_call(config, placement, images.shape[1:])
    visible = [types.SimpleNamespace(name="GPU:0")]
    with mock.patch.object(tf.config, "get_visible_devices", return_value=visible):
        # The number of images changes sizes alone.
        towers, batches = build_towers(gpus, images, **{**given, "batch_size": 8})
        (batch,) = batches
        stacked = [tuple(tf.zeros([steps, *one.shape], one.dtype) for one in batch)]
        program = towers._steps  # noqa: SLF001 - its public method runs it.
        compiler = program.experimental_get_compiler_ir(stacked, tf.constant(steps))
    before = compiler(stage="hlo", platform_name="CPU")
    after = compiler(stage="optimized_hlo", platform_name="CPU")
    loops = re.findall(r"^.* while\(.*$", after, re.MULTILINE)
    unknown = [loop for loop in loops if "known_trip_count" not in loop]
    return Program(
        steps,
        len(loops),
        len(unknown) + after.count(" conditional("),
        before.count(" select-and-scatter("),
        after.count(" fusion("),
        sum(after.count(f" {one}(") for one in ("convolution", "dot", "custom-call")),
    )


# ---- kernels


@functools.cache
def _registered():
    by_operation = collections.defaultdict(list)
    for kernel in kernels.get_all_registered_kernels().kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label:
            by_operation[kernel.op].append(kernel)
    return by_operation


def has_kernels():
    """Whether this TensorFlow was built for GPUs."""
    return any(kernel.device_type == "GPU" for kernel in _registered()["MatMul"])


def kernel_of(node):
    """The kernel that computes a node on a GPU; None if there is none."""
    fitting = [
        kernel
        for kernel in _registered()[node.op]
        if all(
            set(_types(node.attr[constraint.name]))
            <= set(constraint.allowed_values.list.type)
            for constraint in kernel.constraint
        )
    ]
    # One for GPUs comes before one for any device.
    return min(fitting, key=lambda kernel: kernel.device_type != "GPU", default=None)


def _types(attribute):
    return [attribute.type] if attribute.type else [*attribute.list.type]


def _on_gpu(device):
    return "GPU" in device.upper()


def asked_of_gpus(graph, default="/gpu:0"):
    """Returns every node, of a graph and its functions, that is meant for a GPU.

    Where no device is asked for, it is that of the call, and of the graph `default`.
    Functions that XLA compiles are left out: it needs no kernels.
    """
    definition = graph.as_graph_def()
    functions = {body.signature.name: body for body in definition.library.function}
    found = []

    def visit(nodes, default):
        for node in nodes:
            device = node.device or default
            if _on_gpu(device) and node.op not in _NOT_PLACED:
                found.append(node)
            for attribute in node.attr.values():
                for called in [attribute.func, *attribute.list.func]:
                    body = functions.get(called.name)
                    if body and not body.attr["_XlaMustCompile"].b:
                        visit(body.node_def, device)

    visit(definition.node, default)
    return found


def without_kernel(graph, default="/gpu:0"):
    """Returns what a graph asks a GPU for and no kernel computes: (operation, *types).

    TensorFlow computes it on the host, and copies inputs and outputs.
    """
    return {
        (node.op, *_constrained_types(node))
        for node in asked_of_gpus(graph, default)
        if kernel_of(node) is None
    }


def _constrained_types(node):
    """Returns the types of a node for which there are several kernels, sorted."""
    constraints = [
        one for kernel in _registered()[node.op] for one in kernel.constraint
    ]
    numbers = {t for one in constraints for t in _types(node.attr[one.name])}
    return sorted(tf.dtypes.as_dtype(number).name for number in numbers)


def _compiled(definition):
    """Returns the names of the functions that XLA compiles; each is one launch."""
    bodies = definition.library.function
    return {body.signature.name for body in bodies if body.attr["_XlaMustCompile"].b}


# ---- crossings


class Crossing(NamedTuple):
    """A tensor that is copied between two memories in a step."""

    name: str
    source: str  # A device; `HOST` also for what a GPU's kernel wants there.
    target: str
    bytes: int


def crossings(function, devices_of_inputs, home="/gpu:0", default="/gpu:0", gpus=1):
    """Returns what a concrete function copies between memories once it is optimized.

    Args:
        function: The function.
        devices_of_inputs: Where its arguments, and after them captured tensors that are
            no variables, are. The last one stands for all further ones.
        home: The device of its variables.
        default: Where operations run that ask for no device.
        gpus: How many GPUs there are.
    """
    after = _optimized(function, devices_of_inputs, home, default, gpus)
    nodes = {node.name: node for node in after.node}
    by_xla = _compiled(after)
    calls = [node for node in after.node if node.op in _CALLS]
    if hidden := {one.op for one in calls if one.attr["f"].func.name not in by_xla}:
        raise ValueError(f"What {', '.join(hidden)} copy is not seen.")
    crossed = {}
    for operation in _imported(function, after).get_operations():
        if operation.name not in nodes:
            continue
        targets, _ = memories(nodes[operation.name])
        inputs = operation.inputs[:1] if operation.type == "If" else operation.inputs
        for tensor, target in zip(inputs, targets, strict=False):
            if tensor.dtype == tf.resource:
                continue
            _, sources = memories(nodes[tensor.op.name])
            source = sources[tensor.value_index]
            if source != target:
                size = tensor.dtype.size * tensor.shape.num_elements()
                crossing = Crossing(tensor.name, source, target, size)
                crossed[tensor.name, target] = crossing
    return [*crossed.values()]


def _optimized(function, devices_of_inputs, home, default, gpus):
    """Places a function as TensorFlow would, and returns it as Grappler rewrites it."""
    graph = function.graph
    definition = graph.as_graph_def(add_shapes=True)
    devices = {}
    remaining = list(devices_of_inputs)
    for tensor in function.inputs:
        if tensor.dtype == tf.resource:
            devices[tensor.op.name] = home
        else:
            last = len(remaining) == 1
            devices[tensor.op.name] = remaining[0] if last else remaining.pop(0)
    for node in definition.node:
        device = devices.get(node.name) or node.device
        node.device = _full((node.op in _OF_VARIABLES and home) or device or default)
        if _on_gpu(node.device) and node.op not in _NOT_PLACED and not kernel_of(node):
            node.device = _full(HOST)
    for body in definition.library.function:
        for node in body.node_def:
            node.device = _full(node.device)
    described = saver.export_meta_graph(graph_def=definition, graph=graph)
    described.graph_def.CopyFrom(definition)
    results = [tensor.name for tensor in graph.outputs]
    results += [operation.name for operation in graph.control_outputs]
    kept = meta_graph_pb2.CollectionDef()
    kept.node_list.value.extend(results)
    described.collection_def["train_op"].CopyFrom(kept)
    config = config_pb2.ConfigProto(allow_soft_placement=True)
    rewriter = config.graph_options.rewrite_options
    rewriter.min_graph_nodes = -1
    rewriter.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.TWO
    after = tf_optimizer.OptimizeGraph(
        config, described, verbose=False, graph_id=b"graph", cluster=_machine(gpus)
    )
    for node in after.node:
        node.device = node.device or _full(default)
    return after


def _machine(gpus):
    """Describes a machine with some H100s."""
    gpu = {
        "type": "GPU",
        "num_cores": 132,
        "frequency": 1980,
        "memory_size": 80 << 30,
        "bandwidth": 3_350_000_000,
        "environment": {"architecture": "9.0", "cuda": "12050", "cudnn": "9030"},
    }
    cpu = {"type": "CPU", "num_cores": 16, "frequency": 2000, "memory_size": 1 << 36}
    described = {HOST: cpu} | {f"/gpu:{number}": gpu for number in range(gpus)}
    named = [
        {"name": _full(name), "properties": properties}
        for name, properties in described.items()
    ]
    return cluster.Cluster(
        devices=[device_properties_pb2.NamedDevice(**one) for one in named]
    )


def _full(device):
    """Returns the whole name of a device, as the optimizer wants it, or nothing."""
    if not device:
        return ""
    kind, number = device.upper().split("/")[-1].removeprefix("DEVICE:").split(":")
    return f"/job:localhost/replica:0/task:0/device:{kind}:{number}"


def _imported(function, definition):
    """Returns a graph in which also what is read from variables has a shape."""
    imported = tf.Graph()
    with imported.as_default():
        variables = {}
        for tensor in function.inputs:
            if tensor.dtype == tf.resource:
                handle = tf.compat.v1.placeholder(tf.resource)
                shapes = handle_data_util.get_resource_handle_data(tensor)
                handle_data_util.set_handle_data(handle, shapes)
                variables[tensor.name] = handle
        tf.import_graph_def(definition, input_map=variables, name="")
    return imported


def memories(node):
    """Returns in which memories a node's inputs and outputs are."""
    device, on_host = HOST, set()
    if _on_gpu(node.device):
        device = "/device" + node.device.partition("/device")[2]
        kernel = kernel_of(node)
        on_host = set(kernel.host_memory_arg) if kernel else set()
        if node.op == "Placeholder" and node.attr["dtype"].type == tf.int32:
            on_host = {"output"}
    signature = op_def_registry.get(node.op)

    def expanded(arguments):
        memories = []
        for argument in arguments:
            count = 1
            if argument.number_attr:
                count = node.attr[argument.number_attr].i
            elif argument.type_list_attr:
                count = len(node.attr[argument.type_list_attr].list.type)
            memories += [HOST if argument.name in on_host else device] * count
        return memories

    return expanded(signature.input_arg), expanded(signature.output_arg)


def main() -> None:
    """Prints a row for each step, and for each program of one GPU."""
    entry_point.import_tensorflow()
    for counted, count, names in (
        (Counts, count_step, STEPS),
        (Program, count_program, PROGRAMS),
    ):
        print(f"{'':<20}" + "".join(f"{one:>12}" for one in counted._fields))
        for name in names:
            numbers = "".join(f"{number:>12,}" for number in count(name))
            print(f"{name:<20}{numbers}", flush=True)


if __name__ == "__main__":
    entry_point.run_program(main)
