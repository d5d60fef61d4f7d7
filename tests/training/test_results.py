"""Results: averages, and what is not finite, whatever the steps of a call."""

import types

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.errors import NotFiniteError
from cifar10.run_directory.averages import average, divergence
from cifar10.towers.graphs import join_numbers
from cifar10.towers.towers import StepResult
from cifar10.training.results import Results

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
    events = []
    return types.SimpleNamespace(
        metric_averages={},
        noise_averages={},
        skipped_steps=0,
        events=events,
        log_event=lambda *event: events.append(event),
    )


def collected(kept, *towers, on_nan="stop"):
    training = types.SimpleNamespace(
        config=Config(on_nan=on_nan),
        dataset=types.SimpleNamespace(classes=10),
        towers=types.SimpleNamespace(tower_names=towers or ["/cpu:0"]),
    )
    return Results(kept, training)


def several(*steps):
    """The result of one call of several steps."""
    return tf.nest.map_structure(lambda *values: tf.stack(values), *steps)


def test_the_first_loss_starts_the_average_and_later_losses_weigh_a_tenth():
    kept = progress()
    results = collected(kept)
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


def test_the_wait_for_results_ends_with_the_newest_step():
    """Otherwise the time of a checkpoint would include steps."""
    computed = []
    results = collected(progress())
    for step in (1, 2, 3):
        numbers = types.SimpleNamespace(numpy=lambda step=step: computed.append(step))
        results.add(step, types.SimpleNamespace(numbers=numbers))
    results.wait()
    assert computed[-1:] == [3]


def test_a_metric_missing_from_steps_needs_no_average():
    kept = progress()
    results = collected(kept)
    present = metrics()
    del present["penalties"]
    results.add(1, result(present, [2.0]))
    assert "penalties/average" not in newest(results)
    assert "penalties" not in kept.metric_averages


def test_numbers_that_are_not_finite_leave_averages_that_a_manifest_can_hold():
    """A loss of a program's own may be finite beside them."""
    kept = progress()
    results = collected(kept)
    for name in ("cross_entropy", "penalties", "total_loss"):
        for wrong in (np.inf, np.nan):
            for one in ({name: wrong}, {}, {name: wrong}):
                results.add(1, result(metrics(**one), [2.0]))
                newest(results)
    values = dict(zip(LOSSES, (2.0, 1.5, 0.5, 0.25), strict=True))
    values |= {"first loss": 2.0, "highest loss": 2.0}
    assert kept.metric_averages == pytest.approx(values)


def test_an_error_names_the_step_within_a_call_and_the_tower():
    results = collected(progress(), "/cpu:0", "/cpu:1")
    losses = [[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]]
    results.add(12, several(*[result(metrics(), each) for each in losses]))
    with pytest.raises(NotFiniteError, match="tower 1") as caught:
        newest(results)
    assert caught.value.step == 11


def test_only_consecutive_skipped_steps_count_towards_the_limit():
    kept = progress()
    results = collected(kept, on_nan="skip")
    for step, loss in enumerate([*[np.nan] * 9, 1.0, *[np.nan] * 9], 1):
        results.add(step, result(metrics(), [loss]))
        newest(results)
    assert kept.skipped_steps == 18
    results.add(20, result(metrics(), [np.nan]))
    with pytest.raises(NotFiniteError, match="last 10 steps"):
        newest(results)


def test_a_loss_scale_below_one_ends_a_run():
    results = collected(progress())
    results.add(5, result(metrics(loss_scale=2.0, gradient_norm=0.0), [1.0]))
    assert newest(results)["loss_scale"] == 2.0
    results.add(6, result(metrics(loss_scale=0.5, gradient_norm=0.0), [1.0]))
    with pytest.raises(NotFiniteError, match="float16") as caught:
        newest(results)
    assert caught.value.step == 6


def after(*steps, classes=10, averages=None):
    """What the rule says after steps of (total loss, cross entropy, accuracy)."""
    averages = {} if averages is None else averages
    for of_step in steps:
        named = zip(
            ("total_loss", "cross_entropy", "precision @ 1"), of_step, strict=True
        )
        average(averages, dict(named), classes)
    return divergence(Config(learning_rate=5.0), averages)


FIRST, BETTER, CHANCE = (4.7, 2.4, 0.1), (1.2, 0.4, 0.9), (2.4, 2.3, 0.1)
EXPLODED = (9e24, 2e11, 0.1)


def test_a_diverged_run_gets_advice():
    for steps in (
        [FIRST, *[EXPLODED] * 30],
        [FIRST, *[BETTER] * 99, EXPLODED, *[CHANCE] * 40],  # A dead network.
        [FIRST, *[(9e9, 2.3, 0.1)] * 30],  # The weights alone; outputs are normalized.
        [(-5.0, 2.3, 0.1), *[(1e5, 1e5, 0.1)] * 30],  # A loss of a program's own.
    ):
        assert "--learning_rate below 5.0" in after(*steps)
    # Of unequal classes the most frequent one is guessed.
    assert after((0.8, 0.7, 0.5), *[(9e9, 9e9, 0.9)] * 30, classes=2)
    # One image a step is sometimes right by chance.
    lucky = [EXPLODED if n % 10 else (9e24, 0.0, 1.0) for n in range(99)]
    assert after(FIRST, *lucky)


def test_a_healthy_run_is_not_accused():
    healthy = {
        "at chance": [FIRST, *[CHANCE] * 500],  # A warm-up, or random labels.
        "label noise": [FIRST, *[(2.3, 2.2, 0.15), (3.0, 2.4, 0.1)] * 99],
        "recovered": [FIRST, (500.0, 490.0, 0.1), *[CHANCE] * 20, *[BETTER] * 30],
        "one bad batch at the end": [FIRST, *[BETTER] * 99, EXPLODED],
        "a bad batch of twenty": [FIRST, *[*[BETTER] * 20, EXPLODED] * 30],
        "large from the start": [(9e20, 9e20, 0.1)] * 99,
        "lucky first": [(0.1, 2.3, 0.1), *[(5000.0, 400.0, 0.6)] * 99],
        "negative": [(-5.0, 2.3, 0.1), *[(-5e5, 9.0, 0.1)] * 99],
        "penalties that grow": [FIRST, *[(9e4, 0.3, 0.9)] * 99],
        "a linear model": [FIRST, *[(3e5, 3e5, 0.25)] * 99],  # Its rate is 1,000.
        "a learning rate that is high": [FIRST, *[(60.0, 50.0, 0.1)] * 99],
    }
    assert not {name for name, steps in healthy.items() if after(*steps)}
    imbalanced = [(0.8, 0.7, 0.5), (200.0, 200.0, 0.5), *[(0.4, 0.33, 0.9)] * 99]
    assert not after(*imbalanced, classes=2)
    tiny = [(0.7, 0.7, 0.5), *[(0.0, 0.0, 1.0)] * 99]
    assert not after(*tiny, classes=2)
    assert not divergence(Config(), {}), "a run of an earlier version"
    assert not after(*[EXPLODED] * 30), "resumed from one"


def test_a_resumed_run_is_compared_with_its_own_first_step():
    kept = {}
    assert not after(FIRST, *[BETTER] * 30, averages=kept)
    assert after(*[EXPLODED] * 30, averages={**kept})


def test_failures_become_events():
    kept = progress()
    results = collected(kept, on_nan="skip")
    dead = metrics(cross_entropy=2.5, total_loss=2.5)
    wild = metrics(cross_entropy=1e9, total_loss=1e9)
    for step, one in enumerate([metrics(), metrics(), *[wild] * 20, *[dead] * 9], 1):
        results.add(step, result(one, [np.nan if step == 2 else 1.0]))
        newest(results)
    events = [(step, event) for step, event, _ in kept.events]
    assert events == [(2, "skip"), (16, "divergence")]
