"""Results: what is not finite is named, whatever the number of steps a call."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.training.results import NotFiniteError, Results


def metrics(**changed):
    values = {
        "total_loss": 2.0,
        "cross_entropy": 1.5,
        "weight_decay": 0.5,
        "gradient_norm": 1.0,
        **changed,
    }
    return {name: tf.constant(value) for name, value in values.items()}


def several(*steps):
    return {name: tf.stack([step[name] for step in steps]) for name in steps[0]}


def test_steps_of_one_call_are_averaged_as_single_ones():
    losses = [4.0, 2.0, 3.0]
    single, together = Results(["/cpu:0"]), Results(["/cpu:0"])
    each = [metrics(total_loss=loss) for loss in losses]
    for step, (one, loss) in enumerate(zip(each, losses, strict=True), 1):
        single.add(step, one, tf.constant([loss]))
    together.add(3, several(*each), tf.constant(losses)[:, None])
    assert single.read() == together.read()
    assert single.loss_averages == together.loss_averages


def test_the_step_within_a_call_and_the_tower_are_named():
    results = Results(["/cpu:0", "/cpu:1"])
    losses = tf.constant([[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]])
    results.add(12, several(*[metrics()] * 3), losses)
    with pytest.raises(NotFiniteError, match=r"at step 11 the loss of tower 1"):
        results.read()


def test_a_loss_scale_below_one_is_no_training():
    results = Results(["/cpu:0"])
    results.add(5, metrics(loss_scale=2.0, gradient_norm=0.0), tf.constant([1.0]))
    assert results.read()["loss_scale"] == 2.0
    results.add(6, metrics(loss_scale=0.5, gradient_norm=0.0), tf.constant([1.0]))
    with pytest.raises(NotFiniteError, match="at step 6 the gradients are not finite"):
        results.read()
