"""Timing: the rate is of training only, and what limits it is told from the waiting."""

import contextlib
import types

import pytest

from cifar10.training import bottleneck, timing
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
    for module in (timing, bottleneck):
        monkeypatch.setattr(module, "time", fake)
    return clock


def run_steps(throughput, clock, *seconds):
    for duration in seconds:
        clock.now += duration
        throughput.count()


def test_rate_is_of_all_steps_and_all_their_images(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 0.5, 1.5)

    assert throughput.take() == pytest.approx((128.0, 1.0))


def test_what_runs_under_leave_out_does_not_slow_the_rate(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 1.0)
    with throughput.leave_out():
        clock.now += 60.0
    run_steps(throughput, clock, 1.0)
    with throughput.leave_out():
        clock.now += 30.0

    assert throughput.take() == pytest.approx((128.0, 1.0))


def test_time_is_left_out_even_if_what_runs_there_raises(clock):
    throughput = Throughput(128)
    with contextlib.suppress(ZeroDivisionError), throughput.leave_out():
        clock.now += 60.0
        raise ZeroDivisionError
    run_steps(throughput, clock, 2.0)

    assert throughput.take() == pytest.approx((64.0, 2.0))


def test_each_window_begins_anew(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 8.0, 8.0)
    with throughput.leave_out():
        clock.now += 60.0
    throughput.take()
    run_steps(throughput, clock, 4.0)

    assert throughput.take() == pytest.approx((32.0, 4.0))


def test_window_without_steps_has_no_rate(clock):
    throughput = Throughput(128)
    clock.now += 5.0

    assert throughput.take() is None


def test_clock_that_stood_still_gives_no_rate(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 0.0)

    assert throughput.take() is None


def test_what_waits_for_images_is_input_bound(clock):
    throughput = Throughput(128)
    for _ in range(4):
        clock.now += 1.0
        throughput.count(1, waited=0.31)
    throughput.take()
    assert throughput.verdict().startswith(
        "Input-bound: the towers waited 31% of the time for images."
    )


def test_what_hardly_waits_is_compute_bound(clock):
    throughput = Throughput(128)
    clock.now += 2.0
    throughput.count(2, waited=0.004)
    throughput.take()
    assert throughput.verdict() == (
        "Compute-bound: the towers waited 0.2% of the time for images."
    )


def test_without_a_timed_step_there_is_no_verdict():
    assert Throughput(128).verdict() == ""


def test_median_window_is_not_the_slow_first_one(clock):
    throughput = Throughput(128)
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
