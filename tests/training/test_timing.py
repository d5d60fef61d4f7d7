"""Timing: the rate is of training only, and what limits it is told from the waiting."""

import math
import types

import pytest

from cifar10.training import timing
from cifar10.training.timing import Goodput, Throughput


@pytest.fixture
def clock(monkeypatch):
    def clock():
        return clock.now

    clock.now = 1000.0
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=clock))
    return clock


def run_steps(throughput, clock, *seconds):
    for duration in seconds:
        clock.now += duration
        throughput.count()


def test_rate_is_of_all_steps_of_a_window_and_all_their_images(clock):
    throughput = Throughput(128, clock)
    run_steps(throughput, clock, 0.5, 1.5)
    assert throughput.take() == pytest.approx(128.0)
    run_steps(throughput, clock, 4.0)
    assert throughput.take() == pytest.approx(32.0)
    clock.now += 5.0
    assert math.isnan(throughput.take()), "there was no step"


def test_time_between_steps_does_not_slow_the_rate(clock):
    ledger = Goodput()
    throughput = Throughput(128, ledger.stepping)
    ledger.enter("training")
    run_steps(throughput, clock, 1.0)
    for part in ("saving", "evaluation"):
        with ledger.during(part):
            clock.now += 60.0
    run_steps(throughput, clock, 1.0)
    assert throughput.take() == pytest.approx(128.0)


def test_verdict_is_of_the_time_without_images(clock):
    throughput = Throughput(128, clock)
    assert throughput.verdict() == ""
    clock.now += 2.0
    throughput.count(2, waited=0.004)
    assert throughput.verdict().startswith("Compute-bound")
    for _ in range(4):
        clock.now += 1.0
        throughput.count(1, waited=0.9)
    throughput.take()
    assert throughput.verdict().startswith("Input-bound")


def test_one_forecast_comes_after_a_slow_step_or_some_fast_ones(clock):
    slow = Throughput(128, clock)
    clock.now += 60.0
    assert not slow.allows_forecast()  # No step was counted.
    slow.restart()
    run_steps(slow, clock, 20.0)
    assert slow.allows_forecast()
    assert slow.forecast(30) == pytest.approx(600.0)

    fast, seconds = Throughput(128, clock), []
    for _ in range(60):
        for _ in range(10):
            run_steps(fast, clock, 0.01)
            if fast.allows_forecast():
                seconds.append(fast.forecast(1000))
        fast.take()
    assert seconds == pytest.approx([10.0])
