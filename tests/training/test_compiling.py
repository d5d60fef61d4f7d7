"""Whether XLA compiles whole steps is found out by trying it."""

import json
import types

import keras
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.towers.devices import Placement
from cifar10.training import assembly, compiling
from small_towers import (
    assert_equal,
    make_towers,
    random_batch,
    small_model,
    split,
    values,
)

GPU = Placement(("/gpu:0",), simulated=False, description="a GPU")
GPUS = Placement(("/gpu:0", "/gpu:1"), simulated=False, description="two GPUs")
CPU = Placement(("/cpu:0",), simulated=False, description="the CPU")


@pytest.fixture
def lasting(monkeypatch):
    """Makes single steps, and then a program of them, last so many seconds."""

    def lasting(steps, program):
        clock = iter([0.0, steps, 10.0, 10.0 + program])
        fake = types.SimpleNamespace(perf_counter=lambda: next(clock))
        monkeypatch.setattr(compiling, "time", fake)

    return lasting


@pytest.mark.parametrize(
    ("placement", "flags", "expected"),
    [
        (GPU, {}, True),
        (GPU, {"accumulate": 2, "steps_per_call": 20}, True),
        (GPUS, {}, False),
        (CPU, {}, False),
        (GPU, {"max_steps": 4999}, False),
        (GPU, {"deterministic": True}, False),
        (GPU, {"verify_steps": 100}, False),
        (GPU, {"sections": "2"}, False),
        (GPU, {"variable_device": "cpu"}, False),
        (GPU, {"steps_per_call": 1}, False),
    ],
)
def test_only_long_runs_on_one_gpu_try_it(placement, flags, expected):
    config = Config(**{"precision": "float32", **flags})
    config = assembly.resolve_config(config, placement)
    assert compiling.is_possible(config, placement) is expected


@pytest.mark.parametrize(
    ("program", "is_faster"), [(2.0, True), (4.0, False), (6.0, False)]
)
def test_a_trial_writes_nothing_and_takes_what_is_clearly_faster(
    four_cpus, lasting, capsys, program, is_faster
):
    dropout = keras.layers.Dropout(0.5, seed=1)
    builder = make_towers(small_model(dropout), four_cpus[:1])
    batch = split(*random_batch(), 1)
    before = values(builder)
    lasting(1.0, program)
    assert compiling.try_program(builder, batch, 4) is is_faster is builder.tower.xla
    assert_equal(values(builder), before)
    assert f"{program / 4:.2f} of their time" in capsys.readouterr().err
    builder.step(batch)
    assert builder.state.global_step == 1


class OnTheHost(keras.layers.Layer):
    """A layer that XLA cannot compile."""

    def call(self, inputs):
        return tf.ensure_shape(
            tf.numpy_function(lambda x: x, [inputs], tf.float32), inputs.shape
        )


def test_a_model_that_xla_refuses_trains_without_it(four_cpus, capsys):
    builder = make_towers(small_model(OnTheHost()), four_cpus[:1])
    batch = split(*random_batch(), 1)
    assert not compiling.try_program(builder, batch, 4)
    assert "cannot compile" in capsys.readouterr().err
    builder.step(batch)
    assert builder.state.global_step == 1


@pytest.mark.slow
def test_a_run_keeps_what_its_trial_has_found(
    tmp_path, stand_in_dir, monkeypatch, lasting
):
    """A resumed run tries nothing: XLA rounds otherwise."""
    monkeypatch.setattr(compiling, "is_possible", lambda *_: True)
    options = {"model": "small_runs:small", "num_gpus": 1, "batch_size": 8}
    for program, is_faster in ((0.5, True), (5.0, False)):
        lasting(1.0, program)
        run = tmp_path / str(is_faster)
        for end in (3, 5):
            runs.train(run, stand_in_dir, max_steps=end, **options)
            settings = json.loads((run / "config.json").read_text())
            assert settings["xla"] is is_faster
            assert settings["steps_per_call"] is None
