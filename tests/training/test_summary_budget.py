"""Histograms and images take at most 5 % of the time."""

import contextlib
import types

import pytest
import tensorflow as tf

from cifar10.training import tensorboard
from cifar10.training.tensorboard import Summaries


class Written:
    """The steps of a second each that have summaries, which take some seconds."""

    def __init__(self, monkeypatch, steps, *, cost, first_cost=None):
        self.now, self.steps = 1000.0, []
        self._cost, self._first_cost = cost, first_cost or cost
        fake = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(tensorboard, "time", fake)
        model = types.SimpleNamespace(trainable_variables=[])
        training = types.SimpleNamespace(
            config=types.SimpleNamespace(output=types.SimpleNamespace(summary_steps=1)),
            towers=types.SimpleNamespace(
                state=types.SimpleNamespace(model=model),
                gradients=lambda batches: {"kernel": tf.constant([1.0])},
            ),
            sections="in two sections",
        )
        summaries = Summaries(
            types.SimpleNamespace(
                training=training,
                hooks=types.SimpleNamespace(notify=self._write),
                apart=lambda part: contextlib.nullcontext(),
                newest_batches=lambda: [(None, None)],
            )
        )
        for step in range(1, steps + 1):
            self.now += 1.0
            summaries.on_step(step)

    def _write(self, event, step, summary):
        del event, summary
        self.now += self._cost if self.steps else self._first_cost
        self.steps.append(step)


def test_cheap_summaries_are_all_written_whatever_the_first_cost(monkeypatch):
    """Tracing belongs to the start."""
    written = Written(monkeypatch, 50, cost=0.04, first_cost=1e3)
    assert written.steps == list(range(1, 51))


@pytest.mark.parametrize("cost", [0.1, 20.0])
def test_summaries_that_are_dear_take_a_twentieth_of_the_time(monkeypatch, cost):
    written = Written(monkeypatch, 5000, cost=cost)
    counted = (len(written.steps) - 1) * cost  # The first is of the start.
    most = 0.05 * (written.now - 1000.0)
    assert 0.8 * most - cost < counted <= most + cost
