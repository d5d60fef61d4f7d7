"""Results: averages, and what is not finite, whatever the steps of a call."""

import types

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.errors import NotFiniteError
from cifar10.towers.graphs import join_numbers
from cifar10.towers.towers import StepResult
from cifar10.training.results import Results, divergence

LOSSES = ("total_loss", "cross_entropy", "penalties", "precision @ 1")


def metrics(**changed):
    values = dict(zip(LOSSES, (2.0, 1.5, 0.5, 0.25), strict=True))
    values |= {"gradient_norm": 1.0, **changed}
    return {name: tf.constant(value) for name, value in values.items()}


def result(one, losses):
    """The result of a step with these metrics and losses of the towers."""
    losses = tf.constant(losses, tf.float32)
    return StepResult(one, losses, join_numbers(one, losses))


def newest(results):
    """Reads all results; returns the metrics of the last step."""
    *_, (_, found) = results.read()
    return found


def progress():
    return types.SimpleNamespace(metric_averages={}, noise_averages={}, skipped_steps=0)


def several(*steps):
    """The result of one call of several steps."""
    return tf.nest.map_structure(lambda *values: tf.stack(values), *steps)


def test_first_loss_starts_the_average_and_later_ones_weigh_a_tenth():
    kept = progress()
    results = Results(kept, ["/CPU:0"])
    for values, expected in (
        ((4.0, 3.0, 1.0, 0.5), (4.0, 3.0, 1.0, 0.5)),
        ((2.0, 0.0, 2.0, 0.5), (3.8, 2.7, 1.1, 0.5)),
        ((0.0, -1.1, 1.1, 0.0), (3.42, 2.32, 1.1, 0.45)),
    ):
        one = metrics(**dict(zip(LOSSES, values, strict=True)))
        results.add(1, result(one, values[:1]))
        newest(results)
        averages = dict(zip(LOSSES, expected, strict=True))
        averages |= {"first loss": 4.0, "highest loss": 4.0}
        assert kept.metric_averages == pytest.approx(averages)


def test_a_metric_that_steps_do_not_have_needs_no_average():
    kept = progress()
    results = Results(kept, ["/cpu:0"])
    present = metrics()
    del present["penalties"]
    results.add(1, result(present, [2.0]))
    assert "penalties/average" not in newest(results)
    assert "penalties" not in kept.metric_averages


def test_the_step_within_a_call_and_the_tower_are_named():
    results = Results(progress(), ["/cpu:0", "/cpu:1"])
    losses = [[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]]
    results.add(12, several(*[result(metrics(), each) for each in losses]))
    with pytest.raises(NotFiniteError, match="tower 1") as caught:
        newest(results)
    assert caught.value.step == 11


def test_only_skipped_steps_in_a_row_add_up():
    kept = progress()
    results = Results(kept, ["/cpu:0"], skips=True)
    for step, loss in enumerate([*[np.nan] * 9, 1.0, *[np.nan] * 9], 1):
        results.add(step, result(metrics(), [loss]))
        newest(results)
    assert kept.skipped_steps == 18
    results.add(20, result(metrics(), [np.nan]))
    with pytest.raises(NotFiniteError, match="last 10 steps"):
        newest(results)


def test_a_loss_scale_below_one_is_no_training():
    results = Results(progress(), ["/cpu:0"])
    results.add(5, result(metrics(loss_scale=2.0, gradient_norm=0.0), [1.0]))
    assert newest(results)["loss_scale"] == 2.0
    results.add(6, result(metrics(loss_scale=0.5, gradient_norm=0.0), [1.0]))
    with pytest.raises(NotFiniteError, match="float16") as caught:
        newest(results)
    assert caught.value.step == 6


def test_a_diverged_run_gets_a_note_and_a_healthy_run_none():
    config = Config(learning_rate=5.0)
    names = ("first loss", "highest loss", "total_loss", "cross_entropy")
    for losses, is_told in (
        ((4.7, 1e25, 9e24, 2e11), True),
        ((4.7, 1e25, 2.4, 2.31), True),  # A dead network, whose weights have decayed.
        ((4.7, 500.0, 1.2, 0.4), False),  # It has recovered.
        ((4.7, 9.0, 4.4, 2.31), False),  # It has hardly begun.
        ((9000.0, 9000.0, 800.0, 700.0), False),  # A wild start.
        ((30.0, 35.0, 33.0, 0.1), False),  # Large penalties.
    ):
        said = divergence(config, 10, dict(zip(names, losses, strict=True)))
        assert ("--learning_rate below 5.0" in said) == is_told, losses
    assert not divergence(config, 10, {}), "a run of an earlier version"
