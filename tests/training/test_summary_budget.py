"""Histograms and images take at most 5 % of the time, and change no graph."""

import types

import pytest
import tensorflow as tf

import runs
from cifar10.towers.towers import TowerBuilder
from cifar10.training import tensorboard
from cifar10.training.tensorboard import Summaries, TensorBoard


class Written:
    """The steps of a second each that have summaries, which take some seconds."""

    def __init__(self, monkeypatch, steps, *, cost, first_cost=None):
        self.now, self.steps, self.told = 1000.0, [], []
        self._cost, self._first_cost = cost, first_cost or cost
        fake = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(tensorboard, "time", fake)
        model = types.SimpleNamespace(trainable_variables=[])
        training = types.SimpleNamespace(
            config=types.SimpleNamespace(output=types.SimpleNamespace(summary_steps=1)),
            towers=types.SimpleNamespace(state=types.SimpleNamespace(model=model)),
            sections="in two sections",
        )
        summaries = Summaries(
            types.SimpleNamespace(
                training=training,
                hooks=types.SimpleNamespace(notify=self._write),
                say=self.told.append,
            )
        )
        result = types.SimpleNamespace(numbers=tf.constant([1.0]), gradients={})
        for step in range(1, steps + 1):
            self.now += 1.0
            if summaries.wants_result(step):
                summaries.on_call(step, [(None, None)])
                summaries.on_result(step, result)

    def _write(self, event, step, summary):
        del event, summary
        self.now += self._cost if self.steps else self._first_cost
        self.steps.append(step)


def test_cheap_summaries_are_all_written_whatever_the_first_cost(monkeypatch):
    """Tracing belongs to the start."""
    written = Written(monkeypatch, 50, cost=0.04, first_cost=1e3)
    assert written.steps == list(range(1, 51))
    assert written.told == []


@pytest.mark.parametrize("cost", [0.1, 20.0])
def test_summaries_that_are_dear_take_a_twentieth_of_the_time(monkeypatch, cost):
    written = Written(monkeypatch, 5000, cost=cost)
    counted = (len(written.steps) - 1) * cost  # The first is of the start.
    most = 0.05 * (written.now - 1000.0)
    assert 0.8 * most - cost < counted <= most + cost
    assert len(written.told) == 1


def test_postponing_does_not_change_the_graph(tmp_path, stand_in_dir, monkeypatch):
    write, run = TensorBoard.on_summary, TowerBuilder.step
    written, graphs = [], []

    def on_summary(board, step, summary):
        written.append(step)
        write(board, step, summary)

    def step(towers, batches, *, return_gradients=False):
        graphs.append(return_gradients)
        return run(towers, batches, return_gradients=return_gradients)

    monkeypatch.setattr(TensorBoard, "on_summary", on_summary)
    monkeypatch.setattr(TowerBuilder, "step", step)
    monkeypatch.setattr(tensorboard, "MOST_SHARE", 1e-9)
    options = {"num_gpus": 1, "batch_size": 4, "max_steps": 6, "checkpoint_steps": 6}
    options |= {"summary_steps": 2, "log_frequency": 2}
    runs.train(tmp_path / "run", stand_in_dir, **options)
    # On several machines only the chief writes, and all of them run one graph.
    assert graphs == [False, True] * 3
    assert written == [2, 4]
