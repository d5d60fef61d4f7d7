"""`--xla --steps_per_call`: a call's steps, images included, as one program of XLA."""

import dataclasses
import functools
import signal
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.distributed.workers import Workers
from cifar10.errors import StoppedError, UsageError
from cifar10.input import distortions, on_device, pipeline
from cifar10.process.signals import StopSignals
from cifar10.towers import devices
from cifar10.training import assembly, train as training
from cifar10.training.one_program import OneProgram, fits_one_program
from small_sets import OnDisk
from small_towers import values

IMAGES = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), np.uint8)
LABELS = np.random.default_rng(1).integers(0, 10, 100, np.int32)
MIXED = {"rand_augment": {}, "random_erasing": {}, "mixup": {}}


def dense(image_shape, classes):
    layers = [keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def pooled(image_shape, classes):
    """Takes images of any size."""
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def configure(towers=1, **options):
    placement = devices.place_towers(towers)
    requested = Config(
        **{
            "num_gpus": towers,
            "batch_size": 8 // towers,
            "precision": "float64",
            "momentum": 0.9,
            "max_steps": 50,
            "steps_per_call": 10,
            "xla": True,
            **options,
        }
    )
    return assembly.resolve_config(requested, placement, workers=1), placement


def build(model, **options):
    """Returns a small training as one program."""
    config, placement = configure(model=model, **options)
    keras.backend.clear_session(free_memory=False)
    state = assembly.build_state(config, "/cpu:0", IMAGES.shape[1:], 10)
    builder, *_ = assembly.build_towers(
        config, placement, [state], None, Workers(), IMAGES
    )
    maker = assembly.build_maker(config, 10)
    return OneProgram(builder, config, IMAGES, LABELS, maker)


def run(program, calls):
    """Runs calls of some sizes; returns all losses and what the steps have written."""
    losses = []
    with program.open_batches(0, 0) as queue:
        for size in calls:
            batches = [queue.get() for _ in range(size)]
            result = program.steps(batches) if size > 1 else program.step(batches[0])
            losses += np.atleast_1d(result.metrics["total_loss"]).tolist()
    return [losses, *values(program)]


def assert_close(found, expected, difference):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=difference)


def test_xla_draws_the_numbers_of_tensorflows_kernels():
    seed = tf.constant([3, 2**40], tf.int64)
    drawn = distortions.uniform([5, 7], seed)
    compiled = tf.function(distortions.uniform, autograph=False, jit_compile=True)
    np.testing.assert_array_equal(compiled([5, 7], seed), drawn)
    of_tensorflow = tf.random.stateless_uniform([5, 7], seed, alg="philox")
    np.testing.assert_array_equal(of_tensorflow, drawn)


STAGES = [{"until": 0.2, "image_size": 20}, {"until": 0.6, "image_size": 24}, {}]


@pytest.mark.parametrize(
    ("distortion", "options", "size"),
    [
        pytest.param(
            "flip_translate",
            {"stages": STAGES, "schedule": "linear"},
            24,
            id="stages",
        ),
        pytest.param(
            "tutorial",
            {"augmentation": MIXED},
            None,
            marks=pytest.mark.slow,
            id="augmented",
        ),
    ],
)
def test_batches_are_those_of_the_input(distortion, options, size):
    """Batches 36 to 38, of which the second holds the end of an epoch, for step 12."""
    given = {"distortions": distortion, **options}
    maker = assembly.build_maker(configure(2, seed=5, **given)[0], 10)
    program = build(f"{__name__}:pooled", towers=2, seed=5, **given)
    plain = pipeline.training_batches(
        IMAGES,
        LABELS,
        dataclasses.replace(maker, image_size=size),
        batch_size=4,
        towers=2,
        start_step=36,
    )
    with program.open_batches(36, 12) as queue:
        for expected in plain.take(3):
            made = queue.get()
            assert len(made) == len(expected)
            for tower, (images, labels) in zip(made, expected, strict=True):
                np.testing.assert_allclose(tower[0], images, atol=1e-5)
                np.testing.assert_allclose(tower[1], labels, atol=1e-6)


def test_a_program_of_steps_is_the_same_steps():
    """TensorFlow's kernels compute the single ones, from the same images.

    These are standardized in float32, which XLA rounds differently on some processors.
    """
    model, options = f"{__name__}:dense", {"distortions": "none"}
    single = run(build(model, xla=False, **options), [1] * 4)
    assert_close(run(build(model, **options), [2, 2]), single, 1e-6)


@pytest.mark.slow
def test_twenty_steps_with_dropout_are_the_same():
    built = [build("small_runs:small", towers=2) for _ in range(2)]
    single, several = run(built[0], [1] * 20), run(built[1], [1, 7, 1, 1, 7, 1, 1, 1])
    assert_close(several, single, 1e-8)
    variables = built[0].state.variables()
    (place,) = (n for n, v in enumerate(variables) if "seed_generator" in v.name)
    np.testing.assert_array_equal(several[1 + place], single[1 + place])


def train(train_dir, data_dir, **options):
    """Trains 12 steps in calls of four."""
    defaults = {
        "num_gpus": 1,
        "batch_size": 8,
        "max_steps": 12,
        "checkpoint_steps": 4,
        "log_frequency": 4,
        "summary_steps": 100,
        "steps_per_call": 4,
        "xla": True,
        "precision": "float64",
    }
    return runs.train(train_dir, data_dir, **{**defaults, **options})


@pytest.mark.slow
def test_a_run_that_was_stopped_between_calls_goes_on(tmp_path, stand_in_dir, capsys):
    """In calls; a part of it in single steps ends there but for rounding."""
    model = {"model": "small_runs:small"}
    straight = train(tmp_path / "straight", stand_in_dir, **model)
    assert "--xla" not in capsys.readouterr().out
    stop = StopSignals()
    steps = []

    def after_step(step):
        steps.append(step)
        if step == 8:
            stop.requested = signal.SIGTERM

    hook = types.SimpleNamespace(on_step=after_step)
    interrupted = functools.partial(training.train, stop=stop, hooks=[hook])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train", interrupted)
        with pytest.raises(StoppedError, match="step 8"):
            train(tmp_path / "run", stand_in_dir, checkpoint_steps=12, **model)
    assert steps == [4, 8]
    resumed = train(tmp_path / "run", stand_in_dir, **model)
    assert runs.largest_difference(resumed, straight) < 1e-12


TWO = ("/gpu:0", "/gpu:1")


@pytest.mark.parametrize(
    ("names", "home", "options", "possible"),
    [
        (("/cpu:0",), "/cpu:0", {}, True),
        (("/cpu:0", "/cpu:1"), "/cpu:0", {"input_device": "cpu"}, True),
        (TWO[:1], "/gpu:0", {}, True),
        (TWO[:1], "/cpu:0", {}, False),
        (TWO, "/gpu:0", {}, False),
        (("/cpu:0",), "/cpu:0", {"accumulate": 2}, False),
    ],
)
def test_where_the_steps_of_a_call_are_one_program(
    names, home, options, possible, monkeypatch
):
    placement = devices.Placement(names, simulated=False, description="")
    state = types.SimpleNamespace(device=home, model=None)
    towers = types.SimpleNamespace(state=state)
    xla = {"sections": "1", "steps_per_call": 2, "xla": True}
    config = assembly.resolve_config(Config(**xla, **options), placement)
    assert fits_one_program(config, placement, towers, IMAGES, LABELS) is possible
    assert not fits_one_program(config, placement, towers, OnDisk(IMAGES), LABELS)
    # A data set that does not fit on the GPU is in no program.
    most = on_device.stored_bytes(IMAGES, LABELS) - 1
    monkeypatch.setattr(on_device, "MOST_BYTES", most)
    fits = possible and not placement.on_gpus
    assert fits_one_program(config, placement, towers, IMAGES, LABELS) is fits
    if not placement.on_gpus:
        config = config.replace(input_device="gpu", accumulate=1)
        with pytest.raises(UsageError, match="--input_device"):
            fits_one_program(config, placement, towers, IMAGES, LABELS)
