"""`--xla --steps_per_call`: a call's steps, images included, as one program of XLA."""

import functools
import signal
import types
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.config.signals import StopSignals
from cifar10.errors import StoppedError, UsageError
from cifar10.input import distortions, on_device, pipeline
from cifar10.input.augmentation.batches import AugmentedBatches
from cifar10.input.pipeline import make_batch
from cifar10.towers import devices
from cifar10.training import assembly, settings, train as training
from cifar10.training.one_program import OneProgram, is_possible
from small_sets import OnDisk

IMAGES = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), np.uint8)
MUON = {"optimizer": "muon", "schedule": "linear", "learning_rate": 0.24}
LABELS = np.random.default_rng(1).integers(0, 10, 100, np.int32)
AUGMENTATION = {
    "rand_augment": {},
    "random_erasing": {},
    "mixup": {"probability": 0.5},
    "cutmix": {"probability": 0.5},
}


def dense(image_shape, classes):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )


def convolved(image_shape, classes):
    """A model with batch statistics, and so with more than gradients to write."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(3, 5, strides=4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )


def filters(image_shape, classes):
    """A model of filters alone: Muon's rates of all else are made for airbench."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(3, 5, strides=4, activation="relu", use_bias=False),
            keras.layers.Dropout(0.5),
            keras.layers.Conv2D(classes, 1, use_bias=False),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )


def build(model, *, towers=1, xla=True, **options):
    """Returns the towers of a small training and its program."""
    placement = devices.place_towers(towers)
    requested = Config(
        model=model,
        num_gpus=towers,
        xla=xla,
        **{
            "batch_size": 8 // towers,
            "precision": "float64",
            "momentum": 0.9,
            "max_steps": 50,
            "steps_per_call": 10,
            **options,
        },
    )
    config = settings.resolve(requested, placement, workers=1)
    keras.backend.clear_session(free_memory=False)
    state = assembly.build_state(config, "/cpu:0", IMAGES.shape[1:], 10)
    builder, _ = assembly.build_towers(config, placement, [state], None, None, IMAGES)
    make = assembly.build_maker(config, 10)
    return builder, OneProgram(config, builder, IMAGES, LABELS, make)


def run(builder, program, calls):
    """Runs calls of some sizes; returns all losses and what the steps have written."""
    losses = []
    with program.open_batches(0, 0) as queue:
        for size in calls:
            batches = [queue.get() for _ in range(size)]
            result = program(batches) if size > 1 else builder.step(batches[0])
            losses += np.atleast_1d(result.metrics["total_loss"]).tolist()
    state = builder.state
    return losses, [
        *(v.numpy() for v in state.model.variables),
        *(v.numpy() for v in state.optimizer.variables),
        *(v.numpy() for v in state.averages),
        state.global_step.numpy(),
    ]


def assert_close(one, other, difference):
    np.testing.assert_allclose(one[0], other[0], rtol=0, atol=difference)
    for value, expected in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=difference)


def test_xla_draws_the_numbers_of_tensorflows_kernels():
    seed = tf.constant([3, 2**40], tf.int64)
    drawn = distortions.uniform([5, 7], seed)
    compiled = tf.function(distortions.uniform, autograph=False, jit_compile=True)
    np.testing.assert_array_equal(compiled([5, 7], seed), drawn)
    of_tensorflow = tf.random.stateless_uniform([5, 7], seed, alg="philox")
    np.testing.assert_array_equal(of_tensorflow, drawn)


@pytest.mark.parametrize(
    ("distortion", "augmentation"),
    [
        ("flip_translate", None),
        pytest.param("tutorial", None, marks=pytest.mark.slow),
        pytest.param("crop_flip", None, marks=pytest.mark.slow),
        pytest.param("none", None, marks=pytest.mark.slow),
        pytest.param("tutorial", AUGMENTATION, marks=pytest.mark.slow, id="augmented"),
    ],
)
def test_the_batches_are_those_of_the_input(distortion, augmentation):
    """Steps 11 to 13, of which the second holds the end of an epoch."""
    how = {"distortions": distortion, "seed": 5, "augmentation": augmentation}
    _, program = build(f"{__name__}:dense", towers=2, **how)
    plain = pipeline.training_batches(
        IMAGES,
        LABELS,
        batch_size=4,
        towers=2,
        distortion=distortion,
        seed=5,
        start_step=11,
        make=AugmentedBatches(augmentation, 10) if augmentation else make_batch,
    )
    with program.open_batches(11, 0) as queue:
        for expected in plain.take(3):
            made = queue.get()
            assert len(made) == len(expected)
            for (images, labels), (others, other_labels) in zip(
                made, expected, strict=True
            ):
                np.testing.assert_allclose(labels, other_labels, atol=1e-6)
                np.testing.assert_allclose(images, others, atol=1e-5)


def test_a_program_of_steps_is_the_same_steps():
    """TensorFlow's kernels compute the single ones, from the same images.

    These are standardized in float32, which XLA rounds differently on some processors.
    """
    model, options = f"{__name__}:dense", {"distortions": "none"}
    single = run(*build(model, xla=False, **options), [1] * 6)
    assert_close(run(*build(model, **options), [3, 3]), single, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [[10] * 5, [1, 7, 7, 1, 7, 7, 1, 1, 7, 7, 1, 1, 1, 1]],
    ids=["tens", "sevens"],
)
def test_fifty_steps_of_tensorflow_are_the_same(calls):
    model = f"{__name__}:convolved"
    single = run(*build(model, xla=False), [1] * 50)
    assert_close(run(*build(model), calls), single, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize(
    ("model", "options"), [("small_runs:small", {}), (f"{__name__}:filters", MUON)]
)
def test_fifty_steps_with_dropout_are_the_same_with_xla(towers, model, options):
    built = [build(model, towers=towers, **options) for _ in range(2)]
    single, several = run(*built[0], [1] * 50), run(*built[1], [10] * 5)
    assert_close(several, single, 1e-8)
    names = [v.path for v in built[0][0].state.model.variables]
    (place,) = (n for n, name in enumerate(names) if "seed_generator" in name)
    np.testing.assert_array_equal(several[1][place], single[1][place])


def train(train_dir, data_dir, **options):
    """Trains 12 steps in calls of four."""
    defaults = {
        "model": "small_runs:small",
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


def assert_same_run(values, expected):
    assert runs.largest_difference(values, expected) < 1e-12


@pytest.mark.slow
def test_a_run_that_was_stopped_between_calls_goes_on(tmp_path, stand_in_dir, capsys):
    straight = train(tmp_path / "straight", stand_in_dir)
    assert "compiles each tower alone" not in capsys.readouterr().out
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
        with pytest.raises(StoppedError, match="SIGTERM after step 8"):
            train(tmp_path / "run", stand_in_dir, checkpoint_steps=12)
    assert steps == [4, 8]
    assert_same_run(train(tmp_path / "run", stand_in_dir), straight)


@pytest.mark.slow
def test_single_steps_end_where_calls_end(tmp_path, stand_in_dir):
    """But for the images, which round in float32, by other kernels."""
    calls = train(tmp_path / "calls", stand_in_dir)
    single = train(tmp_path / "single", stand_in_dir, steps_per_call=1)
    assert runs.largest_difference(calls, single) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_reduced_precision_trains_in_calls(tmp_path, stand_in_dir, precision):
    train(tmp_path / "run", stand_in_dir, precision=precision)
    assert [line["step"] for line in runs.logged(tmp_path / "run")] == [4, 8, 12]
    assert all(
        np.isfinite(line["total_loss"]) for line in runs.logged(tmp_path / "run")
    )


@pytest.mark.slow
def test_what_is_not_one_program_is_said(tmp_path, stand_in_dir, capsys):
    train(tmp_path / "run", stand_in_dir, variable_update="mirrored", num_gpus=2)
    assert "--xla compiles each tower alone here" in capsys.readouterr().out


ONE = ["/gpu:0"]
TWO = ["/gpu:0", "/gpu:1"]


@pytest.mark.parametrize(
    ("names", "home", "options", "possible"),
    [
        (["/cpu:0"], "/cpu:0", {}, True),
        (["/cpu:0", "/cpu:1"], "/cpu:0", {"input_device": "cpu"}, True),
        (ONE, "/gpu:0", {}, True),
        (ONE, "/cpu:0", {}, False),
        (ONE, "/gpu:0", {"input_device": "cpu"}, False),
        (TWO, "/gpu:0", {}, False),
        (["/cpu:0"], "/cpu:0", {"sections": "2"}, False),
        (["/cpu:0"], "/cpu:0", {"accumulate": 2}, False),
    ],
)
def test_where_the_steps_of_a_call_are_one_program(names, home, options, possible):
    placement = devices.Placement(tuple(names), simulated=False, description="")
    towers = SimpleNamespace(state=SimpleNamespace(device=home, model=None))
    config = Config(**{"sections": "1", **options})
    assert is_possible(config, placement, towers, IMAGES, LABELS) is possible


def test_images_on_a_gpu_that_is_not_there_are_refused():
    placement = devices.Placement(("/cpu:0",), simulated=False, description="")
    towers = SimpleNamespace(state=SimpleNamespace(device="/cpu:0", model=None))
    config = Config(sections="1", input_device="gpu")
    with pytest.raises(UsageError, match="--input_device gpu: the towers run on"):
        is_possible(config, placement, towers, IMAGES, LABELS)


def test_a_data_set_that_does_not_fit_on_the_gpu_is_not_in_a_program(monkeypatch):
    placement = devices.Placement(("/gpu:0",), simulated=False, description="")
    towers = SimpleNamespace(state=SimpleNamespace(device="/gpu:0", model=None))
    config = Config(sections="1")
    assert is_possible(config, placement, towers, IMAGES, LABELS)
    most = on_device.stored_bytes(IMAGES, LABELS)
    monkeypatch.setattr(on_device, "MOST_BYTES", most - 1)
    assert not is_possible(config, placement, towers, IMAGES, LABELS)


def test_images_that_are_not_in_memory_are_in_no_program():
    placement = devices.Placement(("/cpu:0",), simulated=False, description="")
    towers = SimpleNamespace(state=SimpleNamespace(device="/cpu:0", model=None))
    config = Config(sections="1")
    assert is_possible(config, placement, towers, IMAGES, LABELS)
    assert not is_possible(config, placement, towers, OnDisk(IMAGES), LABELS)
