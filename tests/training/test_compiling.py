"""Whether XLA compiles whole steps, or the update, is found out by trying it."""

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
    """Makes a step, and then what is tried one after another, last some seconds."""

    def lasting(*seconds):
        # All is traced and compiled in a first call.
        clock = iter([time for one in seconds for time in (0.0, 0.0, one)])
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
        (GPU, {"variable_device": "cpu"}, False),
    ],
)
def test_only_long_runs_on_one_gpu_try_xla(placement, flags, expected):
    config = Config(**{"precision": "float32", **flags})
    config = assembly.resolve_config(config, placement)
    assert compiling.is_possible(config, placement) is expected


STEPS, UPDATE, NOTHING = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("steps", "program", "update", "chosen"),
    [
        (4, 2.0, None, STEPS),
        (4, 4.0, 0.5, UPDATE),
        (4, 6.0, 0.9, NOTHING),
        (1, None, 0.5, UPDATE),
        (1, None, 0.9, NOTHING),
    ],
)
def test_a_trial_writes_nothing_and_chooses_the_clearly_faster_way(
    four_cpus, lasting, capsys, steps, program, update, chosen
):
    dropout = keras.layers.Dropout(0.5, seed=1)
    builder = make_towers(small_model(dropout), four_cpus[:1])
    batch = split(*random_batch(), 1)
    before = values(builder)
    lasting(*[time for time in (1.0, program, update) if time])
    found = compiling.try_programs(builder, batch, steps)
    assert (found["xla"], found["xla_update"]) == chosen
    assert (builder.tower.xla, builder.update.xla) == chosen
    assert_equal(values(builder), before)
    said = capsys.readouterr().err
    tried = (program is not None, update is not None)
    assert ("program of 4 steps" in said, "the update" in said) == tried
    builder.step(batch)
    assert builder.state.global_step == 1


class OnTheHost(keras.layers.Layer):
    """A layer that XLA cannot compile."""

    def call(self, inputs):
        return tf.ensure_shape(
            tf.numpy_function(lambda x: x, [inputs], tf.float32), inputs.shape
        )


def test_a_model_refused_by_xla_trains_without_it(four_cpus, capsys):
    builder = make_towers(small_model(OnTheHost()), four_cpus[:1])
    batch = split(*random_batch(), 1)
    assert not compiling.try_programs(builder, batch, 4)["xla"]
    assert "does not compile" in capsys.readouterr().err
    builder.step(batch)
    assert builder.state.global_step == 1


@pytest.mark.slow
def test_a_run_keeps_the_result_of_its_trial(
    tmp_path, stand_in_dir, monkeypatch, lasting
):
    """A resumed run tries nothing: XLA rounds otherwise."""
    monkeypatch.setattr(compiling, "is_possible", lambda *_: True)
    options = {"model": "small_runs:small", "num_gpus": 1, "batch_size": 8}
    options["steps_per_call"] = 2
    for program, update, chosen in ((0.5, 9.0, STEPS), (5.0, 0.5, UPDATE)):
        lasting(1.0, program, update)
        run = tmp_path / str(program)
        for end in (3, 5):
            runs.train(run, stand_in_dir, max_steps=end, **options)
            settings = json.loads((run / "config.json").read_text())
            assert (settings["xla"], settings["xla_update"]) == chosen
