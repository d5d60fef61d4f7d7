"""Timing: the rate is of training only, and what limits it is told from the waiting."""

import math
import types

import pytest

from cifar10.training import timing
from cifar10.training.timing import Goodput, Throughput


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    fake = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", fake)
    return clock


@pytest.fixture
def ledger(clock):
    ledger = Goodput(began=clock.now)
    ledger.enter("training")
    return ledger


def run_steps(throughput, clock, *seconds):
    for duration in seconds:
        clock.now += duration
        throughput.count()


def test_rate_is_of_all_steps_of_a_window_and_all_their_images(clock, ledger):
    throughput = Throughput(128, ledger)
    run_steps(throughput, clock, 0.5, 1.5)
    assert throughput.take() == pytest.approx(128.0)
    run_steps(throughput, clock, 4.0)
    assert throughput.take() == pytest.approx(32.0)
    clock.now += 5.0
    assert math.isnan(throughput.take()), "there was no step"


def test_time_between_steps_does_not_slow_the_rate(clock, ledger):
    throughput = Throughput(128, ledger)
    run_steps(throughput, clock, 1.0)
    for part in ("saving", "evaluation"):
        with ledger.during(part):
            clock.now += 60.0
    run_steps(throughput, clock, 1.0)
    assert throughput.take() == pytest.approx(128.0)


def test_verdict_is_of_the_time_without_images(clock, ledger):
    throughput = Throughput(128, ledger)
    assert throughput.verdict() == ""
    clock.now += 2.0
    with ledger.during("input"):
        clock.now += 0.004
    throughput.count(2)
    assert throughput.verdict().startswith("Compute-bound")
    for _ in range(4):
        clock.now += 0.1
        with ledger.during("input"):
            clock.now += 0.9
        throughput.count()
    throughput.take()
    assert throughput.verdict().startswith("Input-bound")


def test_one_forecast_comes_after_a_slow_step_or_some_fast_ones(clock, ledger):
    slow = Throughput(128, ledger)
    clock.now += 60.0
    assert not slow.allows_forecast()  # No step was counted.
    slow.restart()
    run_steps(slow, clock, 20.0)
    assert slow.allows_forecast()
    assert slow.forecast(30) == pytest.approx(600.0)

    fast, seconds = Throughput(128, ledger), []
    for _ in range(60):
        for _ in range(10):
            run_steps(fast, clock, 0.01)
            if fast.allows_forecast():
                seconds.append(fast.forecast(1000))
        fast.take()
    assert seconds == pytest.approx([10.0])
