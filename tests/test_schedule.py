"""The learning rate and the averages' decay by hand."""

import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.towers.devices import Placement
from cifar10.towers.schedule import LinearDecay, StaircaseDecay, Warmup, average_decay
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
    check(schedule="linear", warmup_epochs=3.9)
    with pytest.raises(
        UsageError, match=r"--warmup_epochs 4.0: --max_steps 40 are 4.0"
    ):
        check(schedule="linear")


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
