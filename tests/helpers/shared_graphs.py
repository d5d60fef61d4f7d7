"""Helpers: replays of one run, or of its copies, share the graphs of a step."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest

from cifar10.training import replay


@contextlib.contextmanager
def assembled_once():
    """Replays with equal settings of equal runs share what takes most of their time.

    Each begins with the initial values of all variables, as it does alone.
    """
    assemble, known = replay.assemble, {}

    def shared(config):
        train_dir = Path(config.run.train_dir)
        settings = {**config.values, "train_dir": ""}
        recorded = (train_dir / "config.json").read_bytes()
        key = json.dumps(settings, sort_keys=True), recorded
        if key not in known:
            training = assemble(config)
            variables = training.towers.state.variables()
            known[key] = training, [(one, one.numpy()) for one in variables]
        training, initial = known[key]
        for variable, value in initial:
            variable.assign(value)
        return dataclasses.replace(training, train_dir=train_dir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "assemble", shared)
        yield
