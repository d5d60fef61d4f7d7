"""Timing: the rate is of training only, and what limits it is told from the waiting."""

import math
import types

import pytest

from cifar10.training import timing
from cifar10.training.periodic import Log
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
    assert throughput.timed().bottleneck() == ""
    clock.now += 2.0
    with ledger.during("input"):
        clock.now += 0.004
    throughput.count(2)
    assert throughput.timed().bottleneck().startswith("Compute-bound")
    for _ in range(4):
        clock.now += 0.1
        with ledger.during("input"):
            clock.now += 0.9
        throughput.count()
    throughput.take()
    assert throughput.timed().bottleneck().startswith("Input-bound")


class ForecastLoop:
    """A training of 1,000 steps that reports every tenth."""

    def __init__(self, ledger):
        output = types.SimpleNamespace(log_frequency=10)
        run = types.SimpleNamespace(max_steps=1000, max_hours=None)
        checkpoints = types.SimpleNamespace(on_nan="stop")
        config = types.SimpleNamespace(output=output, run=run, checkpoints=checkpoints)
        self.training = types.SimpleNamespace(config=config)
        self.goodput, self.throughput = ledger, Throughput(128, ledger)
        self.results = types.SimpleNamespace(wait=list)
        self.hooks = types.SimpleNamespace(notify=lambda *_: None)
        self.read_results, self.said = dict, []
        self.say = self.said.append


@pytest.mark.parametrize(
    ("seconds", "expected"), [(20.0, ["5.5 hours"]), (0.05, ["48 seconds"])]
)
def test_one_forecast_comes_after_a_slow_step_or_some_fast_ones(
    clock, ledger, seconds, expected
):
    loop = ForecastLoop(ledger)
    log = Log(loop)
    clock.now += 60.0
    log.on_step(0)  # No step was counted.
    loop.throughput.restart()
    for step in range(1, 101):
        run_steps(loop.throughput, clock, seconds)
        log.on_step(step)
    found = [" ".join(text.split()[1:3]) for text in loop.said if text]
    assert found == expected
