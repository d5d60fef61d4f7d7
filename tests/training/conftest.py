"""A clock that tests of a run's hours set."""

import types

import pytest

from cifar10.training import progress
from cifar10.training.loop import Loop


@pytest.fixture
def an_hour_a_step(monkeypatch):
    """Each step takes an hour, and all else no time."""
    now = [0.0]
    fake = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(progress, "time", fake)
    call = Loop._call

    def slow(self, batches, count):
        now[0] += 3600.0 * count
        return call(self, batches, count)

    monkeypatch.setattr(Loop, "_call", slow)
