"""Histograms and images take at most 5 % of the time, and change no result."""

import types

import keras
import numpy as np
import pytest

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.towers.towers import TowerBuilder
from cifar10.training import summary_budget, train as training
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


def test_sets_that_are_cheap_are_all_written(clock):
    budget = SummaryBudget(1)
    assert sets_of(budget, clock, 50, cost=0.04) == list(range(1, 51))
    assert budget.take_note() == ""


@pytest.mark.parametrize("cost", [0.1, 1.0, 20.0])
def test_sets_that_are_dear_take_a_twentieth_of_the_time(clock, cost):
    budget, began = SummaryBudget(1), clock.now
    written = sets_of(budget, clock, 5000, cost=cost)
    counted = (len(written) - 1) * cost  # The first is of the start.
    assert counted == pytest.approx(0.05 * (clock.now - began), abs=cost)


def test_the_first_set_with_its_tracing_belongs_to_the_start(clock):
    budget = SummaryBudget(1)
    written = sets_of(budget, clock, 10, cost=0.04, first_cost=1e3)
    assert written == list(range(1, 11))


def test_it_is_said_once_that_sets_are_postponed(clock):
    budget = SummaryBudget(100)
    notes = []
    for _ in range(20):
        sets_of(budget, clock, 3, cost=10.0)
        notes.append(budget.take_note())
    said = "".join(notes)
    assert said in notes
    assert "every 100 steps would take more than 5% of the time" in said
    assert max(map(len, said.splitlines())) <= 80


def linear(image_shape, classes):
    layers = [keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def test_postponing_changes_neither_result_nor_graph(
    tmp_path, stand_in_dir, monkeypatch, capsys
):
    monkeypatch.setitem(models.REGISTRY, "linear", linear)
    write, run = TrainSummaries.histograms, TowerBuilder.step
    written, graphs = [], []

    def histograms(summaries, step, values):
        written.append(step)
        write(summaries, step, values)

    def step(towers, batches, *, return_gradients=False):
        graphs.append(return_gradients)
        return run(towers, batches, return_gradients=return_gradients)

    monkeypatch.setattr(TrainSummaries, "histograms", histograms)
    monkeypatch.setattr(TowerBuilder, "step", step)
    results = []
    for share in (100.0, 0.0):
        monkeypatch.setattr(summary_budget, "_MOST_SHARE", share)
        written.append(f"share {share}")
        train_dir = tmp_path / str(share)
        config = Config(
            train_dir=str(train_dir),
            model="linear",
            data="synthetic",
            data_dir=str(stand_in_dir),
            num_gpus=1,
            batch_size=4,
            max_steps=8,
            checkpoint_steps=8,
            summary_steps=2,
            log_frequency=4,
        )
        training.train(config)
        results.append(runs.variables(runs.checkpoint(train_dir, 8)))
    runs.assert_equal(results[1], results[0])
    # On several machines only the chief writes, and all of them run one graph.
    assert graphs == [False, True] * 8
    # What a set costs is known from the second one on.
    assert written == ["share 100.0", 2, 4, 6, 8, "share 0.0", 2, 4]
    assert capsys.readouterr().out.count("They are written less often.") == 1
    rates = [line["examples_per_sec"] for line in runs.logged(tmp_path / "0.0")]
    assert np.isfinite(rates).all()
