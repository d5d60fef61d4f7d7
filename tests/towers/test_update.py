"""The update on a GPU: nothing in it waits for the host, told from graphs alone."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from cifar10 import model as models
from cifar10.towers import optimizers
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

KINDS = [
    ("sgd", False),
    ("muon", True),
    ("adamw", True),
    ("lion", False),
]  # Names, and whether the loss is scaled.


def build(name, scale_loss, *, devices=("/cpu:0",), **options):
    """A tower with filters, biases and batch norm; the loss is the models' own."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    optimizer = optimizers.build(name, 0.1, 0.9, scale_loss=scale_loss)
    rates = {
        "learning_rate": lambda examples_seen: tf.constant(0.1, tf.float64),
        "average_decay": lambda step: tf.constant(0.75, tf.float64),
    }
    return TowerBuilder(
        TrainState(model, optimizer),
        devices,
        tower=Tower(models.inference, models.loss),
        update=Update(**rates, **options),
    )


def batch(seed=0, first=0.0):
    random = np.random.default_rng(seed)
    images = random.normal(size=(8, 6, 6, 3))
    images[0, 0, 0, 0] += first
    labels = random.integers(0, 3, 8)
    return [(tf.constant(images, tf.float32), tf.constant(labels, tf.int32))]


def users(op):
    reading = [user for tensor in op.outputs for user in tensor.consumers()]
    return {*reading, *op._control_outputs}


@pytest.mark.parametrize(("name", "scale_loss"), KINDS)
def test_only_assignments_wait_for_the_host(name, scale_loss):
    """A branch is chosen by the host, which waits for the device until it can."""
    graph = build(name, scale_loss).trace(batch()).graph
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


@functools.cache
def kernels_on_gpu(kind):
    registered = kernels.get_registered_kernels_for_op(kind).kernel
    return [one for one in registered if one.device_type in ("GPU", "DEFAULT")]


def kernel_on_gpu(op):
    """Returns the kernel that TensorFlow registers for GPUs, if there is one."""
    for kernel in kernels_on_gpu(op.type):
        if all(
            op.node_def.attr[limit.name].type in limit.allowed_values.list.type
            for limit in kernel.constraint
        ):
            return kernel
    return None


def in_host_memory(op, arguments, tensors):
    """Returns the tensors of an operation on a GPU that are in the host's memory."""
    kernel = kernel_on_gpu(op)
    tensors, found = iter(tensors), []
    for argument in arguments:
        listed = argument.number_attr and op.get_attr(argument.number_attr)
        for _ in range(listed or 1):
            tensor = next(tensors)
            if kernel and argument.name in kernel.host_memory_arg:
                found.append(tensor)
    return found


@pytest.mark.parametrize(("name", "scale_loss"), KINDS)
def test_no_number_of_a_step_visits_the_host(name, scale_loss):
    """Some kernels for GPUs, as of `Equal` for int32, compute in the host's memory."""
    graph = build(name, scale_loss).trace(batch()).graph
    operations = [
        op
        for op in graph.get_operations()
        if kernel_on_gpu(op)
        and op.type not in ("If", "IdentityN")
        # Of other operations when deterministic, as in all tests.
        and "SparseSoftmax" not in op.name
    ]
    from_host = {
        tensor.name
        for op in operations
        for tensor in in_host_memory(op, op.op_def.output_arg, op.outputs)
    }
    visits = [
        (op.type, tensor.name)
        for op in operations
        for tensor in in_host_memory(op, op.op_def.input_arg, op.inputs)
        if tensor.dtype != tf.resource
        and tensor.name not in from_host
        and tf.get_static_value(tensor) is None
    ]
    assert not visits
