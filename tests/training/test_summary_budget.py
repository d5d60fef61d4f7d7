"""Histograms and images take at most 5 % of the time, and change no graph."""

import types

import pytest

import runs
from cifar10.towers.towers import TowerBuilder
from cifar10.training import tensorboard
from cifar10.training.tensorboard import SummaryBudget, TensorBoard


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    fake = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(tensorboard, "time", fake)
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


def test_cheap_sets_are_all_written_whatever_the_first_cost(clock):
    """Tracing belongs to the start."""
    budget = SummaryBudget(1)
    written = sets_of(budget, clock, 50, cost=0.04, first_cost=1e3)
    assert written == list(range(1, 51))
    assert budget.take_note() == ""


@pytest.mark.parametrize("cost", [0.1, 20.0])
def test_sets_that_are_dear_take_a_twentieth_of_the_time(clock, cost):
    budget, began = SummaryBudget(1), clock.now
    written = sets_of(budget, clock, 5000, cost=cost)
    counted = (len(written) - 1) * cost  # The first is of the start.
    assert counted == pytest.approx(0.05 * (clock.now - began), abs=cost)


def test_postponing_does_not_change_the_graph(tmp_path, stand_in_dir, monkeypatch):
    write, run = TensorBoard.on_summary, TowerBuilder.step
    allowed = iter([True, False])
    written, graphs = [], []

    def on_summary(board, step, summary):
        written.append(step)
        write(board, step, summary)

    def step(towers, batches, *, return_gradients=False):
        graphs.append(return_gradients)
        return run(towers, batches, return_gradients=return_gradients)

    monkeypatch.setattr(TensorBoard, "on_summary", on_summary)
    monkeypatch.setattr(TowerBuilder, "step", step)
    monkeypatch.setattr(SummaryBudget, "allows", lambda _: next(allowed))
    options = {"num_gpus": 1, "batch_size": 4, "max_steps": 4, "checkpoint_steps": 4}
    options |= {"summary_steps": 2, "log_frequency": 2}
    runs.train(tmp_path / "run", stand_in_dir, **options)
    # On several machines only the chief writes, and all of them run one graph.
    assert graphs == [False, True] * 2
    assert written == [2]
