"""Results: averages, what is not finite, sudden rises, whatever the steps a call."""

import types

import numpy as np
import pytest
import tensorflow as tf

from cifar10.errors import NotFiniteError
from cifar10.towers.graphs import join_numbers
from cifar10.towers.towers import StepResult
from cifar10.training.results import Results

LOSSES = ("total_loss", "cross_entropy", "weight_decay", "precision @ 1")


def metrics(**changed):
    values = dict(zip(LOSSES, (2.0, 1.5, 0.5, 0.25), strict=True))
    values |= {"gradient_norm": 1.0, **changed}
    return {name: tf.constant(value) for name, value in values.items()}


def result(one, losses):
    """The result of a step with these metrics and losses of the towers."""
    losses = tf.constant(losses, tf.float32)
    return StepResult(one, losses, join_numbers(one, losses))


def progress():
    return types.SimpleNamespace(metric_averages={}, skipped_steps=0)


def several(*steps):
    """The result of one call of several steps."""
    return tf.nest.map_structure(lambda *values: tf.stack(values), *steps)


def test_first_loss_starts_the_average_and_later_ones_weigh_a_tenth():
    kept = progress()
    results = Results(kept, ["/CPU:0"], print)
    for values, expected in (
        ((4.0, 3.0, 1.0, 0.5), (4.0, 3.0, 1.0, 0.5)),
        ((2.0, 0.0, 2.0, 0.5), (3.8, 2.7, 1.1, 0.5)),
        ((0.0, -1.1, 1.1, 0.0), (3.42, 2.32, 1.1, 0.45)),
    ):
        one = metrics(**dict(zip(LOSSES, values, strict=True)))
        results.add(1, result(one, values[:1]))
        results.read()
        averages = dict(zip(LOSSES, expected, strict=True))
        assert kept.metric_averages == pytest.approx(averages)


def test_a_metric_that_steps_do_not_have_needs_no_average():
    kept = progress()
    results = Results(kept, ["/cpu:0"], print)
    present = metrics()
    del present["weight_decay"]
    results.add(1, result(present, [2.0]))
    assert "weight_decay/average" not in results.read()
    assert "weight_decay" not in kept.metric_averages


def test_the_step_within_a_call_and_the_tower_are_named():
    results = Results(progress(), ["/cpu:0", "/cpu:1"], print)
    losses = [[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]]
    results.add(12, several(*[result(metrics(), each) for each in losses]))
    with pytest.raises(NotFiniteError, match="tower 1") as caught:
        results.read()
    assert caught.value.step == 11


def test_only_skipped_steps_in_a_row_add_up():
    kept = progress()
    results = Results(kept, ["/cpu:0"], print, skips=True)
    for step, loss in enumerate([*[np.nan] * 9, 1.0, *[np.nan] * 9], 1):
        results.add(step, result(metrics(), [loss]))
        results.read()
    assert kept.skipped_steps == 18
    results.add(20, result(metrics(), [np.nan]))
    with pytest.raises(NotFiniteError, match="last 10 steps"):
        results.read()


def test_a_loss_scale_below_one_is_no_training():
    results = Results(progress(), ["/cpu:0"], print)
    results.add(5, result(metrics(loss_scale=2.0, gradient_norm=0.0), [1.0]))
    assert results.read()["loss_scale"] == 2.0
    results.add(6, result(metrics(loss_scale=0.5, gradient_norm=0.0), [1.0]))
    with pytest.raises(NotFiniteError, match="float16") as caught:
        results.read()
    assert caught.value.step == 6


# ---- Sudden rises


def warnings(cross_entropies):
    """Returns what is said of a run with these cross entropies, read ten by ten."""
    said = []
    results = Results(progress(), ["/cpu:0"], said.append)
    for first in range(0, len(cross_entropies), 10):
        part = cross_entropies[first : first + 10]
        one = {name: tf.ones(len(part)) for name in metrics()}
        one["cross_entropy"] = tf.constant(part, tf.float32)
        losses = [[loss] for loss in part]
        results.add(first + len(part), result(one, losses))
        results.read()
    return said


def test_a_sudden_rise_is_named_once_in_a_hundred_steps():
    [warning] = warnings([0.09] * 35 + [0.17, 0.43, 1.33, 12.4, 9.0])
    assert "step 39" in warning
    assert "12.40" in warning
    assert "step 3 " in warnings([3.9, 7.0, 17.0] + [30.0] * 7)[0]
    assert len(warnings([2.0] * 10 + ([50.0] + [2.0] * 19) * 12)) == 3


def test_noise_of_a_falling_loss_of_eight_images_is_no_rise():
    """As measured: the deviation of an image's loss is about the mean's root."""
    generator = np.random.default_rng(0)
    means = 2.3 * np.exp(-np.arange(2000) / 600)
    # A gamma distribution has the long tail of images that are taken for others.
    shape = means**2 / (1.5 * means) * 8
    losses = generator.gamma(shape, means / shape)
    assert warnings(losses) == []
