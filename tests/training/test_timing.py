"""Timing: the rate is of training only, and what limits it is told from the waiting."""

import contextlib
import math
import types

import pytest

from cifar10.training import bottleneck, goodput
from cifar10.training.goodput import Goodput
from cifar10.training.timing import Throughput


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    fake = types.SimpleNamespace(perf_counter=clock)
    for module in (goodput, bottleneck):
        monkeypatch.setattr(module, "time", fake)
    return clock


def run_steps(throughput, clock, *seconds):
    for duration in seconds:
        clock.now += duration
        throughput.count()


def test_rate_is_of_all_steps_and_all_their_images(clock):
    throughput = Throughput(128, clock)
    run_steps(throughput, clock, 0.5, 1.5)

    assert throughput.take() == pytest.approx(128.0)


def test_what_is_no_step_does_not_slow_the_rate(clock):
    ledger = Goodput()
    throughput = Throughput(128, ledger.stepping)
    ledger.enter("training")
    run_steps(throughput, clock, 1.0)
    for part in ("saving", "evaluation"):
        with ledger.during(part):
            clock.now += 60.0
    run_steps(throughput, clock, 1.0)
    with contextlib.suppress(ZeroDivisionError), ledger.during("start"):
        clock.now += 60.0
        raise ZeroDivisionError
    run_steps(throughput, clock, 2.0)

    assert throughput.take() == pytest.approx(96.0)


def test_each_window_begins_anew(clock):
    throughput = Throughput(128, clock)
    run_steps(throughput, clock, 8.0, 8.0)
    throughput.take()
    run_steps(throughput, clock, 4.0)

    assert throughput.take() == pytest.approx(32.0)


def test_window_without_steps_has_no_rate(clock):
    throughput = Throughput(128, clock)
    clock.now += 5.0

    assert math.isnan(throughput.take())


def test_clock_that_stood_still_gives_no_rate(clock):
    throughput = Throughput(128, clock)
    run_steps(throughput, clock, 0.0)

    assert math.isnan(throughput.take())


def test_what_waits_for_images_is_input_bound(clock):
    throughput = Throughput(128, clock)
    for _ in range(4):
        clock.now += 1.0
        throughput.count(1, waited=0.31)
    throughput.take()
    assert throughput.verdict().startswith(
        "Input-bound: the towers waited 31% of the time for images.\n"
    )


def test_what_hardly_waits_is_compute_bound(clock):
    throughput = Throughput(128, clock)
    clock.now += 2.0
    throughput.count(2, waited=0.004)
    assert throughput.verdict() == (
        "Compute-bound: the towers waited less than 1% of the time for images."
    )


def test_without_a_timed_step_there_is_no_verdict():
    assert Throughput(128, lambda: 0.0).verdict() == ""


def test_a_slow_step_allows_a_forecast_without_a_logged_line(clock):
    throughput = Throughput(128, clock)
    clock.now += 60.0
    assert not throughput.allows_forecast()  # No step was counted.
    throughput.restart()
    run_steps(throughput, clock, 20.0)
    assert throughput.allows_forecast()
    assert throughput.forecast(30) == pytest.approx(600.0)


def test_fast_steps_allow_one_forecast_after_some_seconds(clock):
    throughput = Throughput(128, clock)
    seconds = []
    for _ in range(60):
        for _ in range(10):
            run_steps(throughput, clock, 0.01)
            if throughput.allows_forecast():
                seconds.append(throughput.forecast(1000))
        throughput.take()
    assert seconds == pytest.approx([10.0])


def test_median_window_is_not_the_slow_first_one(clock):
    throughput = Throughput(128, clock)
    for seconds in (10.0, 0.1, 0.1):  # The first window is a slow start.
        clock.now += seconds
        throughput.count(1, waited=0.01)
        throughput.take()
    assert throughput.median_step() == pytest.approx((0.1, 0.01))


def test_seconds_of_leaves_out_the_first_time(clock):
    durations = iter([100.0, 1.0, 9.0, 2.0, 3.0, 2.5])

    def action():
        clock.now += next(durations)

    assert bottleneck.seconds_of(action) == 2.5


@pytest.mark.parametrize(
    ("step", "waiting", "towers", "averaging"),
    [
        (1.0, 0.0, 0.7, 0.1),  # What is left is the update and Python.
        (1.0, 0.0, 0.85, 0.33),  # Measured alone, they took longer than the step.
        (1.0, 0.6, 0.5, 0.0),  # Bound by the input, with a single tower.
        (1.0, 1.2, 0.5, 0.1),
        (2e-3, 1e-3, 4e-4, 3e-4),
    ],
)
def test_parts_of_a_step_add_up_to_it(step, waiting, towers, averaging):
    parts = bottleneck.divide(step, waiting, towers=towers, averaging=averaging)
    assert sum(parts.values()) == pytest.approx(step)
    assert min(parts.values()) >= 0.0
    assert parts["input: waiting for images"] == min(waiting, step)
    assert (parts["averaging"] > 0.0) == (averaging > 0.0 and waiting < step)


def test_parts_that_fit_into_the_step_are_as_measured():
    parts = bottleneck.divide(1.0, 0.25, towers=0.5, averaging=0.125)
    assert list(parts.values()) == [0.25, 0.5, 0.125, 0.125]
