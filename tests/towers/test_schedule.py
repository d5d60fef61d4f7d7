"""The learning rate and the averages' decay by hand."""

import math

import keras
import pytest
import tensorflow as tf

from cifar10.config.config import ENDING_SCHEDULES, Config
from cifar10.errors import UsageError
from cifar10.towers.devices import Placement
from cifar10.towers.schedule import (
    ENDING,
    CosineDecay,
    LinearDecay,
    OneCycle,
    StaircaseDecay,
    Warmup,
    average_decay,
)
from cifar10.training import settings

# Falls every 2.5 epochs of 40 images: after 100, 200, ... examples.
STAIRCASE = StaircaseDecay(0.5, epochs_per_decay=2.5, examples_per_epoch=40)


@pytest.mark.parametrize(
    ("examples_seen", "rate"),
    [
        (0, 0.5),
        (1, 0.5),
        (99, 0.5),
        (100, 0.05),
        (101, 0.05),
        (199, 0.05),
        (200, 0.005),
        (1000, 0.5e-10),
    ],
)
def test_rate_falls_by_a_tenth_at_each_period(examples_seen, rate):
    assert float(STAIRCASE(examples_seen)) == pytest.approx(rate, rel=1e-12)


def test_the_tutorials_rate_falls_at_350_epochs():
    """The fall is exact to the image, and far beyond what a 32-bit count holds."""
    tutorial = StaircaseDecay(0.1, 350.0, 50_000)
    assert float(tutorial(17_499_999)) == pytest.approx(0.1)
    assert float(tutorial(17_500_000)) == pytest.approx(0.01)
    assert float(tutorial(3 * 17_500_000 - 1)) == pytest.approx(0.001)
    assert float(tutorial(200 * 17_500_000 - 1)) == pytest.approx(0.1**200)


@pytest.mark.parametrize(("batch_size", "towers"), [(12, 1), (6, 2), (4, 3), (3, 4)])
def test_rates_are_the_same_however_the_batch_is_split(batch_size, towers):
    """With 12 images a step the rate falls in the steps that begin at 108 and 204."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def rate(step):
        return STAIRCASE(step * batch_size * towers)

    rates = [rate(tf.constant(step, tf.int64)) for step in range(18)]
    assert {value.dtype for value in rates} == {tf.float64}
    expected = [0.5] * 9 + [0.05] * 8 + [0.005]
    assert [float(value) for value in rates] == pytest.approx(expected, rel=1e-12)


def test_a_linear_fall_that_ends_before_the_warmup_is_refused(four_cpus):
    two_towers = Placement(four_cpus[:2], simulated=True, description="two towers")
    config = {"batch_size": 5, "max_steps": 40, "warmup_epochs": 4.0}

    def check(**changed):
        # 40 steps of 10 images are 4 epochs of 100.
        requested = Config(**{**config, **changed})
        settings.check_epoch(settings.resolve(requested, two_towers), 100)

    check()  # The staircase has no end, so --max_steps may be raised.
    for schedule in ("linear", "cosine"):
        check(schedule=schedule, warmup_epochs=3.9)
        with pytest.raises(
            UsageError, match=r"--warmup_epochs 4.0: --max_steps 40 are 4.0"
        ):
            check(schedule=schedule)


# In batches of 10 images; the staircase falls after 100.
@pytest.mark.parametrize(
    ("examples_seen", "rate"),
    [(0, 0.125), (10, 0.25), (20, 0.375), (30, 0.5), (40, 0.5), (90, 0.5), (100, 0.05)],
)
def test_warmup_rises_by_the_same_each_step_and_then_leaves_the_rate(
    examples_seen, rate
):
    warm = Warmup(STAIRCASE, examples=40.0, global_batch_size=10)
    value = warm(tf.constant(examples_seen, tf.int64))
    assert value.dtype == tf.float64
    assert float(value) == pytest.approx(rate, rel=1e-12)


def test_warmup_leaves_the_end_of_a_linear_fall_at_zero():
    linear = LinearDecay(0.5, total_examples=100)
    warm = Warmup(linear, examples=40.0, global_batch_size=10)
    rates = [float(warm(seen)) for seen in range(0, 101, 10)]
    assert rates[:4] == pytest.approx([0.125, 0.225, 0.3, 0.35])
    assert rates[4:] == [float(linear(seen)) for seen in range(40, 101, 10)]
    assert rates[-1] == 0.0


def test_a_linear_fall_stays_at_zero():
    assert float(LinearDecay(0.5, total_examples=100)(110)) == 0.0


@pytest.mark.parametrize("examples_seen", [0, 1, 10, 333, 500, 750, 999, 1000, 1200])
def test_a_cosine_is_that_of_keras(examples_seen):
    """Keras counts in steps and in float32; one step is an image here."""
    rate = CosineDecay(0.3, total_examples=1000)(tf.constant(examples_seen, tf.int64))
    expected = keras.optimizers.schedules.CosineDecay(0.3, decay_steps=1000)
    assert rate.dtype == tf.float64
    assert float(rate) == pytest.approx(float(expected(examples_seen)), abs=1e-7)


def test_a_cosine_by_hand():
    rates = [float(CosineDecay(0.5, 120)(seen)) for seen in (0, 40, 60, 80, 120)]
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125, 0.0], abs=1e-15)


@pytest.mark.parametrize(
    ("examples_seen", "rate"),
    [
        (0, 0.04),  # A 25th.
        (75, 0.04 + 0.96 * (1 - math.sqrt(0.5)) / 2),  # A quarter of the way up.
        (150, 0.52),
        (300, 1.0),
        (475, 1.0 - (1 - math.sqrt(0.5)) / 2),
        (650, 0.5),
        (1000, 0.04 / 1e4),
        (1010, 0.04 / 1e4),
    ],
)
def test_one_cycle_rises_for_three_tenths_and_then_falls(examples_seen, rate):
    value = OneCycle(1.0, 1000)(tf.constant(examples_seen, tf.int64))
    assert value.dtype == tf.float64
    assert float(value) == pytest.approx(rate, rel=1e-4)
    doubled = OneCycle(2.0, 1000)(examples_seen)
    assert float(doubled) == pytest.approx(2 * float(value), rel=1e-12)


def pytorch_one_cycle(step, highest, total_steps, part=0.3):
    """OneCycleLR of PyTorch 2.9, without its class: `get_lr` with its defaults."""
    lowest = highest / 25 / 1e4
    ends = [part * total_steps - 1, total_steps - 1]
    if step <= ends[0]:
        start, end, done = highest / 25, highest, step / ends[0]
    else:
        start, end = highest, lowest
        done = (step - ends[0]) / (ends[1] - ends[0])
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


def test_one_cycle_is_that_of_pytorch_up_to_a_step():
    """PyTorch's last step is at the end; ours is a step before it, as it always is."""
    cycle, steps = OneCycle(0.1, 128 * 100_000), 100_000
    for step in (0, 1000, 15_000, 29_999, 30_001, 60_000, 99_000, 99_999):
        expected = pytorch_one_cycle(step, 0.1, steps)
        assert float(cycle(128 * step)) == pytest.approx(expected, abs=1e-5)


def test_every_schedule_that_ends_is_one_that_the_flag_names():
    assert tuple(ENDING) == ENDING_SCHEDULES
    for kind in ENDING.values():
        schedule = kind(0.5, 1000)
        assert float(schedule(300)) > 0.3
        assert float(schedule(1000)) < 1e-5


def test_warmup_of_less_than_a_batch_is_none():
    warm = Warmup(STAIRCASE, examples=7.5, global_batch_size=10)
    assert float(warm(0)) == 0.5


@pytest.mark.parametrize(
    ("maximum", "step", "decay"),
    [
        (0.9999, 0, 0.1),
        (0.9999, 1, 2 / 11),
        (0.9999, 90, 0.91),
        (0.9999, 89_989, 89_990 / 89_999),
        (0.9999, 89_991, 0.9999),
        (0.9999, 10**6, 0.9999),
        (0.5, 90, 0.5),
        (0.0, 0, 0.0),
    ],
)
def test_average_decay_grows_to_its_maximum(maximum, step, decay):
    value = average_decay(maximum, tf.constant(step, tf.int64))
    assert value.dtype == tf.float64
    assert float(value) == pytest.approx(decay, rel=1e-12, abs=1e-15)
