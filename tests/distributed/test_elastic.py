"""A run that goes on elsewhere ends where it would have ended, in float64."""

import signal
import types
from pathlib import Path

import numpy as np
import pytest

import runs
from cifar10.config.config import Config
from cifar10.config.signals import StopSignals
from cifar10.errors import StoppedError, UsageError
from cifar10.training import train as training

STEPS = 12
HERE = Path(__file__).parent
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
    with pytest.raises(StoppedError, match=f"after step {step}"):
        training.train(requested, stop, hooks=[hook])


def values(train_dir, step=STEPS):
    return runs.variables(runs.checkpoint(train_dir, step))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batches"),
    [
        ({}, {}),
        (STATEFUL, {"accumulate": 2}),
        (STATEFUL, {"accumulate": 2, "sections": "batch_normalization,dropout"}),
    ],
)
def test_a_run_goes_on_with_other_towers_and_workers(
    tmp_path, stand_in_dir, model, batches
):
    """Four towers; two workers of one; two towers with variables of their own."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    training.train(config(whole, stand_in_dir, num_gpus=4, **model))

    stop_at(4, config(run, stand_in_dir, num_gpus=4, **model))
    flags = runs.flags(
        resume=run, local_workers=2, num_gpus=1, max_steps=8, **model, **batches
    )
    done = runs.run(runs.ROOT / "train_multi_gpu.py", *flags, cwd=HERE)
    assert done.returncode == 0, done.stderr
    assert "Resuming from step 4 " in done.stdout
    mirrored = {"num_gpus": 2, "variable_update": "mirrored", **batches}
    training.train(config(run, stand_in_dir, **model, **mirrored))

    assert runs.largest_difference(values(run), values(whole)) < 1e-8
    kernel = "averages/0/.ATTRIBUTES/VARIABLE_VALUE"
    moved = values(run)[kernel] - values(run, 8)[kernel]
    assert np.abs(moved).max() > 1e-6, "nothing was trained"


@pytest.mark.slow
def test_a_tower_keeps_the_batch_that_batch_norm_sees(tmp_path, stand_in_dir):
    run = tmp_path / "run"
    stop_at(1, config(run, stand_in_dir, num_gpus=4, **STATEFUL))
    with pytest.raises(UsageError, match="batch_size: 4 there, 8 now") as refused:
        training.train(config(run, stand_in_dir, num_gpus=2, **STATEFUL))
    assert "--batch_size 4 --accumulate 2" in str(refused.value)
    again = config(run, stand_in_dir, num_gpus=2, accumulate=2, **STATEFUL)
    stop_at(2, again)
