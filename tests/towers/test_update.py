"""The update on a GPU: nothing in it waits for the host, told from graphs alone."""

import functools

import keras
import pytest
import tensorflow as tf

from benchmarks.gpu_graphs import kernel_of, memories
from cifar10.towers.optimizers import build_optimizer
from small_towers import make_towers

BATCH = tf.TensorSpec([8, 6, 6, 3]), tf.TensorSpec([8], tf.int32)


@functools.cache
def step(name):
    """The graph of a tower with filters, biases and batch norm."""
    layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6, 6, 3)), *layers])
    optimizer = build_optimizer(name, 0.1, 0.9)
    return make_towers(model, ["/cpu:0"], optimizer=optimizer).trace([BATCH]).graph


KINDS = ["sgd", "muon", "adamw"]


def users(op):
    reading = [user for tensor in op.outputs for user in tensor.consumers()]
    return {*reading, *op._control_outputs}


@pytest.mark.parametrize("name", KINDS)
def test_only_assignments_wait_for_the_host(name):
    """A branch is chosen by the host, which waits for the device until it can."""
    graph = step(name)
    operations = graph.get_operations()
    [branch] = [op for op in operations if op.type in ("If", "StatelessIf", "While")]
    for attribute in ("then_branch", "else_branch"):
        body = graph._get_function(branch.get_attr(attribute).name).graph
        kinds = {op.type for op in body.get_operations()}
        assert kinds <= {"Placeholder", "AssignVariableOp", "Const", "Identity", "NoOp"}
    later, found = [branch], set()
    while later:
        found |= (new := users(later.pop()) - found)
        later += new
    assert {op.type for op in found} <= {"Identity", "NoOp"}


@pytest.mark.parametrize("name", KINDS)
def test_no_number_of_a_step_visits_the_host(name):
    """Some kernels for GPUs, as of `Equal` for int32, compute in the host's memory."""
    visits, from_host = [], set()
    for op in step(name).get_operations():
        node = op.node_def
        node.device = "/device:GPU:0"
        # Of other operations when deterministic, as in all tests.
        if not kernel_of(node) or op.type == "If" or "SparseSoftmax" in op.name:
            continue
        read, written = memories(node)
        from_host |= {
            tensor.name
            for tensor, memory in zip(op.outputs, written, strict=True)
            if "CPU" in memory
        }
        visits += [
            (op.type, tensor.name)
            for tensor, memory in zip(op.inputs, read, strict=True)
            if "CPU" in memory
            and tensor.dtype != tf.resource
            and tensor.name not in from_host
            and tf.get_static_value(tensor) is None
        ]
    assert not visits
