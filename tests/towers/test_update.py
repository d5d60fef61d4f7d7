"""The update on a GPU: nothing in it waits for the host, told from graphs alone."""

import keras
import pytest
import tensorflow as tf

from cifar10.towers import optimizers
from small_towers import make_towers


def users(op):
    reading = [user for tensor in op.outputs for user in tensor.consumers()]
    return {*reading, *op._control_outputs}


@pytest.mark.parametrize(
    ("name", "scale_loss"), [("sgd", False), ("muon", True), ("adamw", True)]
)
def test_only_assignments_wait_for_the_host(name, scale_loss):
    """A branch is chosen by the host, which waits for the device until it can."""
    layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6, 6, 3)), *layers])
    optimizer = optimizers.build(name, 0.1, 0.9, scale_loss=scale_loss)
    batch = tf.TensorSpec([8, 6, 6, 3]), tf.TensorSpec([8], tf.int32)
    graph = make_towers(model, ["/cpu:0"], optimizer=optimizer).trace([batch]).graph
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
