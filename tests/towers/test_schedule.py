"""The learning rate and the averages' decay by hand."""

import itertools
import math
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers.schedule import (
    CURVES,
    average_decay,
    cosine,
    linear,
    one_cycle,
    staircase,
    warmed_up,
)
from cifar10.training import assembly
from small_towers import resolved


def scaled(highest, curve, examples, seen):
    """A rate as `build_update` computes it."""
    return highest * curve(tf.cast(seen, tf.float64) / examples)


# Falls after 100, 200, ... examples.
STAIRCASE = partial(scaled, 0.5, staircase, 100)


def rates(schedule, examples_seen):
    """Returns a schedule's rates as a step computes them, in float64."""
    found = [schedule(tf.constant(seen, tf.int64)) for seen in examples_seen]
    assert {rate.dtype for rate in found} == {tf.float64}
    return [float(rate) for rate in found]


def test_rate_falls_by_a_tenth_at_each_period():
    seen = [0, 1, 99, 100, 101, 199, 200, 1000]
    expected = [0.5, 0.5, 0.5, 0.05, 0.05, 0.05, 0.005, 0.5e-10]
    assert rates(STAIRCASE, seen) == pytest.approx(expected, rel=1e-12)
    # Exact to the image, and far beyond what a 32-bit count holds.
    period = 17_500_000  # 350 epochs of 50,000 images, as in the tutorial.
    seen = [period - 1, period, 3 * period - 1, 200 * period - 1]
    expected = pytest.approx([0.1, 0.01, 0.001, 0.1**200], rel=1e-9, abs=0.0)
    assert rates(partial(scaled, 0.1, staircase, period), seen) == expected


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_a_fraction_of_the_highest_rate(name):
    """For the least, the default and the largest value of each of its parameters."""
    curve, seen = CURVES[name], [*range(0, 1001, 10), 1010]
    shaping = {**curve.parameters}
    shaping.pop(curve.period, None)  # This one only says what a time of 1 is.
    values = {key: numbers for key, (*numbers, _) in shaping.items()}
    for chosen in itertools.product(*values.values()):
        factor = partial(curve.function, **dict(zip(values, chosen, strict=True)))
        found = rates(partial(scaled, 1.0, factor, 1000), seen)
        assert 0.0 <= min(found) < 0.5 < max(found) <= 1.0


def test_a_schedule_ending_before_the_warmup_is_refused():
    def check(**changed):
        # 40 steps of 10 images are 4 epochs of 100.
        options = {"batch_size": 10, "max_steps": 40, "warmup_epochs": 4.0, **changed}
        assembly.check_epoch(resolved(**options), 100)

    check()  # The staircase has no end, so --max_steps may be raised.
    for schedule in ("linear", "cosine"):
        check(schedule=schedule, warmup_epochs=3.9)
        with pytest.raises(UsageError, match="--warmup_epochs"):
            check(schedule=schedule)


def test_warmup_rises_by_the_same_each_step_and_then_leaves_the_rate():
    """In batches of 10 images; the staircase falls after 100."""
    seen = [0, 10, 20, 30, 40, 90, 100]
    warm = partial(warmed_up, STAIRCASE, 40.0, 10)
    expected = [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.05]
    assert rates(warm, seen) == pytest.approx(expected, rel=1e-12)
    falling = partial(scaled, 0.5, linear, 100)
    warm = partial(warmed_up, falling, 40.0, 10)
    assert rates(warm, seen[:4]) == pytest.approx([0.125, 0.225, 0.3, 0.35])
    assert rates(warm, seen[4:]) == rates(falling, seen[4:])
    # A warmup of less than a batch changes nothing.
    warm = partial(warmed_up, STAIRCASE, 7.5, 10)
    assert rates(warm, [0]) == [0.5]


def test_a_linear_fall_stays_at_zero():
    found = rates(partial(scaled, 0.5, linear, 100), [0, 50, 100, 110])
    assert found == [0.5, 0.25, 0.0, 0.0]


def test_the_cosine_equals_kerass():
    """Keras counts in steps and in float32; one step is an image here."""
    seen = [0, 1, 10, 333, 500, 750, 999, 1000, 1200]
    of_keras = keras.optimizers.schedules.CosineDecay(0.3, decay_steps=1000)
    expected = [float(of_keras(step)) for step in seen]
    assert rates(partial(scaled, 0.3, cosine, 1000), seen) == pytest.approx(
        expected, abs=1e-7
    )


def test_one_cycle_rises_for_three_tenths_and_then_falls():
    quarter = (1 - math.sqrt(0.5)) / 2  # Of the way, after a quarter of its time.
    expected = {
        0: 0.04,  # A 25th.
        75: 0.04 + 0.96 * quarter,
        150: 0.52,
        300: 1.0,
        475: 1.0 - quarter,
        650: 0.5,
        1000: 0.04 / 1e4,
        1010: 0.04 / 1e4,
    }
    found = rates(partial(scaled, 1.0, one_cycle, 1000), expected)
    assert found == pytest.approx([*expected.values()], rel=1e-4)
    doubled = rates(partial(scaled, 2.0, one_cycle, 1000), expected)
    np.testing.assert_allclose(doubled, np.multiply(2, found), rtol=1e-12)


def test_average_decay_grows_to_its_maximum():
    for maximum, step, decay in (
        (0.9999, 0, 0.1),
        (0.9999, 1, 2 / 11),
        (0.9999, 90, 0.91),
        (0.9999, 89_989, 89_990 / 89_999),
        (0.9999, 89_991, 0.9999),
        (0.5, 90, 0.5),
        (0.0, 0, 0.0),
    ):
        (found,) = rates(lambda seen, most=maximum: average_decay(most, seen), [step])
        assert found == pytest.approx(decay, rel=1e-12, abs=1e-15)
