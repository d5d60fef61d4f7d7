"""Histograms and images take at most 5 % of the time, and change no result."""

import types

import numpy as np
import pytest

import runs
from cifar10.towers.towers import TowerBuilder
from cifar10.training import summary_budget
from cifar10.training.summaries import TrainSummaries
from cifar10.training.summary_budget import SummaryBudget


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    fake = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(summary_budget, "time", fake)
    return clock


def sets_of(budget, clock, steps, *, cost, step_seconds=1.0, first_cost=None):
    """Runs steps that may each have a set; returns those that have one."""
    written = []
    for step in range(1, steps + 1):
        clock.now += step_seconds
        if budget.allows():
            for _ in range(2):  # Before and after the step.
                with budget.spending(step):
                    clock.now += cost / 2 if written else (first_cost or cost) / 2
            written.append(step)
    return written


@pytest.mark.parametrize("first_cost", [0.04, 1e3])
def test_cheap_sets_are_all_written_whatever_the_first_cost(clock, first_cost):
    """Tracing belongs to the start."""
    budget = SummaryBudget(1)
    written = sets_of(budget, clock, 50, cost=0.04, first_cost=first_cost)
    assert written == list(range(1, 51))
    assert budget.take_note() == ""


@pytest.mark.parametrize("cost", [0.1, 1.0, 20.0])
def test_sets_that_are_dear_take_a_twentieth_of_the_time(clock, cost):
    budget, began = SummaryBudget(1), clock.now
    written = sets_of(budget, clock, 5000, cost=cost)
    counted = (len(written) - 1) * cost  # The first is of the start.
    assert counted == pytest.approx(0.05 * (clock.now - began), abs=cost)


def test_it_is_said_once_that_sets_are_postponed(clock):
    budget = SummaryBudget(100)
    notes = []
    for _ in range(20):
        sets_of(budget, clock, 3, cost=10.0)
        notes.append(budget.take_note())
    said = "".join(notes)
    assert said in notes
    assert "100 steps" in said


def test_postponing_changes_neither_result_nor_graph(
    tmp_path, stand_in_dir, monkeypatch
):
    write, run = TrainSummaries.histograms, TowerBuilder.step
    allowed = iter([True] * 4 + [True, True, False, False])
    written, graphs = [], []

    def histograms(summaries, step, values):
        written.append(step)
        write(summaries, step, values)

    def step(towers, batches, *, return_gradients=False):
        graphs.append(return_gradients)
        return run(towers, batches, return_gradients=return_gradients)

    monkeypatch.setattr(TrainSummaries, "histograms", histograms)
    monkeypatch.setattr(TowerBuilder, "step", step)
    monkeypatch.setattr(SummaryBudget, "allows", lambda _: next(allowed))
    options = {"num_gpus": 1, "batch_size": 4, "max_steps": 8, "checkpoint_steps": 8}
    options |= {"summary_steps": 2, "log_frequency": 4}
    whole, postponed = (
        runs.train(tmp_path / name, stand_in_dir, **options)
        for name in ("whole", "postponed")
    )
    runs.assert_equal(postponed, whole)
    # On several machines only the chief writes, and all of them run one graph.
    assert graphs == [False, True] * 8
    assert written == [2, 4, 6, 8, 2, 4]
    rates = [line["examples_per_sec"] for line in runs.logged(tmp_path / "postponed")]
    assert np.isfinite(rates).all()
