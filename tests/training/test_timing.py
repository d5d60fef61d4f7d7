"""Timing: the rate is of steps only, and what limits it is told from the waiting."""

import contextlib
import math
import time
import types

import pytest

import runs
from cifar10.training import console, timing
from cifar10.training.periodic import Log
from cifar10.training.timing import Timer


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    fake = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", fake)
    return clock


@pytest.fixture
def timer(clock):  # noqa: ARG001 - the time that it measures.
    """A timer of steps that have begun."""
    timer = Timer()
    timer.enter("training")
    return timer


def run_steps(timer, clock, *seconds):
    for duration in seconds:
        clock.now += duration
        timer.steps += 1


def test_each_moment_belongs_to_one_part(clock):
    timer = Timer()
    clock.now += 5.0
    timer.enter("training")
    clock.now += 4.0
    with contextlib.suppress(ZeroDivisionError), timer.during("saving"):
        clock.now += 3.0
        with timer.during("input"):
            clock.now += 2.0
        raise ZeroDivisionError
    clock.now += 4.0
    found = {part: seconds for part, seconds in timer.seconds().items() if seconds}
    assert found == {"start": 5.0, "training": 8.0, "input": 2.0, "saving": 3.0}
    assert timer.step_seconds() == 10.0


def test_the_rate_covers_all_steps_since_the_last_call(clock, timer):
    run_steps(timer, clock, 0.5, 1.5)
    assert timer.rate() == pytest.approx(1.0)
    run_steps(timer, clock, 4.0)
    assert timer.rate() == pytest.approx(0.25)
    clock.now += 5.0
    assert math.isnan(timer.rate()), "there was no step"


def test_time_between_steps_does_not_slow_the_rate(clock, timer):
    run_steps(timer, clock, 1.0)
    for part in ("saving", "evaluation"):
        with timer.during(part):
            clock.now += 60.0
    run_steps(timer, clock, 1.0)
    assert timer.rate() == pytest.approx(1.0)


def test_the_verdict_depends_on_the_wait_for_images(clock, timer):
    assert timer.bottleneck() == ""
    clock.now += 2.0
    with timer.during("input"):
        clock.now += 0.004
    timer.steps += 2
    assert timer.bottleneck().startswith("Compute-bound")
    for _ in range(4):
        clock.now += 0.1
        with timer.during("input"):
            clock.now += 0.9
        timer.steps += 1
    assert timer.bottleneck().startswith("Input-bound: the towers waited 60% ")


class ForecastLoop:
    """A run of 1,000 steps that reports every tenth."""

    def __init__(self, timer):
        output = types.SimpleNamespace(log_frequency=10)
        run = types.SimpleNamespace(max_steps=1000, max_hours=None)
        checkpoints = types.SimpleNamespace(on_nan="stop")
        config = types.SimpleNamespace(
            output=output,
            run=run,
            checkpoints=checkpoints,
            global_batch_size=128,
        )
        self.training = types.SimpleNamespace(config=config, steps_per_call=1)
        self.timer = timer
        self.results = types.SimpleNamespace(wait=list)
        self.hooks = types.SimpleNamespace(notify=lambda *_: None)
        self.read_results, self.said = list, []
        self.say = self.said.append


@pytest.mark.parametrize(
    ("seconds", "expected"), [(20.0, ["5.5 hours"]), (0.05, ["48 seconds"])]
)
def test_one_forecast_comes_after_a_slow_step_or_several_fast_steps(
    clock, timer, seconds, expected
):
    loop = ForecastLoop(timer)
    log = Log(loop)
    with timer.during("start"):
        clock.now += 60.0
    log.on_step(0)  # No step was counted.
    for step in range(1, 101):
        run_steps(timer, clock, seconds)
        log.on_step(step)
    assert [" ".join(text.split()[1:3]) for text in loop.said] == expected


def test_a_run_logs_the_parts_of_its_time(tmp_path, stand_in_dir):
    options = {"max_steps": 2, "checkpoint_steps": 1, "log_frequency": 1}
    began = time.perf_counter()
    runs.train(tmp_path / "run", stand_in_dir, num_gpus=1, batch_size=4, **options)
    took = time.perf_counter() - began
    first, last = (line["seconds"] for line in runs.logged(tmp_path / "run"))
    assert 0 < sum(first.values()) < sum(last.values()) < took
    assert first["start"] > 0
    assert last["saving"] > first["saving"] == 0.0


def test_a_steps_line_has_images_a_second_and_seconds_a_batch():
    """Of four towers with 32 images each, as the tutorial counts."""
    metrics = {"total_loss": 4.5, "cross_entropy": 2.0, "precision @ 1": 0.25}
    line = console.step_line(10, {**metrics, "examples_per_sec": 2000.0}, 32)
    assert line.endswith(" 2,000 images/s, 0.016 s/batch")
    line = console.step_line(10, {**metrics, "examples_per_sec": math.nan}, 32)
    assert line.endswith("not timed")
