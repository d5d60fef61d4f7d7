"""A run that goes on elsewhere ends where it would have ended, in float64."""

import signal
import types

import pytest

import runs
import workers as processes
from cifar10.config.config import Config
from cifar10.errors import StoppedError, UsageError
from cifar10.process.signals import StopSignals
from cifar10.training import train as training

STEPS = 12
STATEFUL = {"model": "small_runs:small"}  # Batch norm and dropout.


def config(train_dir, data_dir, **options):
    return Config(
        **{
            "global_batch_size": 16,
            "max_steps": STEPS,
            "checkpoint_steps": 100,
            "learning_rate": 0.01,
            "momentum": 0.9,
            "clip_norm": 5.0,
            "warmup_epochs": 0.01,
            "precision": "float64",
            "deterministic": True,
            "model": runs.SMALL,
            "data": "synthetic",
            "data_dir": str(data_dir),
            "train_dir": str(train_dir),
            **options,
        }
    )


def stop_at(step, requested):
    """Trains as if SIGTERM came during a step."""
    stop = StopSignals()

    def after_step(reached):
        if reached == step:
            stop.requested = signal.SIGTERM

    hook = types.SimpleNamespace(on_step=after_step)
    with pytest.raises(StoppedError, match=f"step {step}"):
        training.train(requested, stop, hooks=[hook])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batches"),
    [
        ({}, {}),
        (STATEFUL, {"accumulate": 2, "sections": "batch_normalization,dropout"}),
    ],
)
def test_a_run_continues_with_other_towers_and_workers(
    tmp_path, stand_in_dir, model, batches
):
    """Four towers; two workers of one; two towers with variables of their own."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    training.train(config(whole, stand_in_dir, num_gpus=4, **model))

    stop_at(4, config(run, stand_in_dir, num_gpus=4, **model))
    said = processes.train(2, resume=run, num_gpus=1, max_steps=8, **model, **batches)
    assert "from step 4 " in said
    mirrored = {"num_gpus": 2, "variable_update": "mirrored", **batches}
    training.train(config(run, stand_in_dir, **model, **mirrored))

    ends, between = (runs.variables(runs.checkpoint(run, step)) for step in (STEPS, 8))
    expected = runs.variables(runs.checkpoint(whole, STEPS))
    assert runs.largest_difference(ends, expected) < 1e-8
    assert runs.largest_difference(ends, between) > 1e-6, "nothing was trained"


@pytest.mark.slow
def test_a_tower_keeps_its_batch_size_with_batch_norm(tmp_path, stand_in_dir):
    run = tmp_path / "run"
    stop_at(1, config(run, stand_in_dir, num_gpus=4, **STATEFUL))
    with pytest.raises(UsageError, match="batch_size: 4 there, 8 now"):
        training.train(config(run, stand_in_dir, num_gpus=2, **STATEFUL))
    again = config(run, stand_in_dir, num_gpus=2, accumulate=2, **STATEFUL)
    stop_at(2, again)
