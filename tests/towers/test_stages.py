"""Stages of a recipe: which step is in which, and what is computed in each."""

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
from cifar10.input import on_device, pipeline
from cifar10.model import inference, loss
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.process.signals import StopSignals
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.towers import towers
from cifar10.towers.stages import Stage, resolve_stages
from cifar10.towers.update import TrainState
from cifar10.training import assembly, loop, train as training
from small_towers import (
    ONE_TOWER,
    line_model,
    make_towers,
    open_batches,
    random_batch,
    resolved,
    small_model,
    split,
    squared_error,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8)
NUMBERS = np.arange(60, dtype=np.int32)


def pooled(image_shape, classes):
    """A model of images of any size."""
    images = keras.Input(image_shape)
    net = keras.layers.Conv2D(3, 5, strides=4, activation="tanh", name="first")(images)
    net = keras.layers.GlobalAveragePooling2D()(net)
    return keras.Model(images, keras.layers.Dense(classes, name="last")(net))


@pytest.fixture(autouse=True)
def in_registry(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "pooled", Architecture(pooled))


# ---- which step is in which stage


@pytest.mark.parametrize(
    ("until", "max_steps", "end"),
    # 0.1 * 30 is more than 3 in floating point; step 18 of 50 begins before 0.375.
    [(0.375, 200, 75), (0.1, 30, 3), (0.375, 50, 19)],
)
def test_a_step_belongs_to_the_stage_at_its_start(until, max_steps, end):
    declared = [{"until": until, "image_size": 24}, {"frozen": ["a"]}]
    config = Config(stages=declared, schedule="linear", max_steps=max_steps)
    first, second = Stage(end, 24, ()), Stage(max_steps, None, ("a",))
    assert resolve_stages(declared, max_steps) == [first, second]
    assert [config.stage(step) for step in (0, end - 1, end)] == [first, first, second]
    assert config.stage(max_steps - 1) == second
    assert Config(max_steps=max_steps).stage(end) == Stage(max_steps, None, ())


def test_the_layers_of_freeze_are_frozen_in_every_stage():
    declared = [{"until": 0.5, "frozen": ["conv1"]}, {}]
    stages = resolve_stages(declared, 10, "conv2")
    assert [{*stage.frozen} for stage in stages] == [{"conv1", "conv2"}, {"conv2"}]


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ("stages = [3]", "stage 1"),
        ("[[stages]]\nuntil = 0.5", "until = 0.5"),
        ("[[stages]]\nuntil = 0.5\n[[stages]]\nuntil = 0.4\n[[stages]]", "stage 2"),
        ("[[stages]]\nfrozen = [1]", r"frozen = \[1\]"),
        ("schedule = 'staircase'\n[[stages]]", "--schedule"),
    ],
)
def test_invalid_stages_are_refused(tmp_path, declared, named):
    recipe = tmp_path / "mine.toml"
    linear = "" if "schedule" in declared else "schedule = 'linear'\n"
    recipe.write_text(linear + declared)
    with pytest.raises(UsageError, match=named):
        Config(recipe=str(recipe))


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        ({"frozen": ["fir"]}, "'fir'"),
        ({"frozen": ["first", "last"]}, "first, last"),
        ({"image_size": 33}, "stage 2 .*image_size = 33: give 1 to 32"),
        ({"image_size": 0}, "image_size = 0: give 1"),
        ({"image_size": 4}, r"\(4, 4, 3\)"),
    ],
)
def test_stages_unsuitable_for_a_model_are_refused(stage, named):
    with pytest.raises(UsageError, match=named):
        build_state([{"until": 0.5}, stage])


def config(declared, **options):
    return resolved(
        stages=declared,
        schedule="linear",
        distortions="flip_translate",
        max_steps=10,
        **{"model": "pooled", "global_batch_size": 5, **options},
    )


def build_state(declared, **options):
    return assembly.build_state(config(declared, **options), "/cpu:0", (32, 32, 3), 10)


# ---- images of another size


def reduced_by_hand(images, size):
    """Reads each image between its pixels, at the middles of larger ones."""
    places = (np.arange(size) + 0.5) * 32 / size - 0.5
    low = np.floor(places).astype(int)
    part = (places - low)[:, None]
    rows = images[:, low] * (1 - part[..., None]) + images[:, low + 1] * part[..., None]
    return rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part


def test_whole_distorted_images_are_reduced_on_the_cpu_and_on_devices():
    size = 24
    order = {"batch_size": 8, "start_step": 11}
    maker = pipeline.BatchMaker("flip_translate", seed=5)
    whole = pipeline.training_batches(IMAGES, NUMBERS, maker, towers=1, **order)
    ((images, labels),) = next(iter(whole))
    expected = reduced_by_hand(images.numpy(), size)
    source = IMAGES, NUMBERS, maker._replace(image_size=size)
    small = pipeline.training_batches(*source, towers=1, **order)
    made = on_device.device_batches(*source, devices=["/cpu:0"], **order)
    for batches in (small, made):
        ((images, numbers),) = next(iter(batches))
        assert (images.dtype, images.shape) == (tf.float32, (8, size, size, 3))
        np.testing.assert_allclose(images, expected, atol=1e-4)
        np.testing.assert_array_equal(numbers, labels)


def test_the_size_of_images_depends_on_the_step_and_not_on_the_batch():
    """After a rollback batches are ahead of the steps that they are for."""
    requested = config([{"until": 0.5, "image_size": 20}, {}])
    for step, size in ((4, 20), (5, 32)):
        opened = open_batches(requested, ONE_TOWER, Workers(), IMAGES, NUMBERS, 7, step)
        with opened as queues:
            ((images, labels),) = queues.get()
        assert images.shape == (5, size, size, 3)
        places = tf.range(35, 40, dtype=tf.int64)
        np.testing.assert_array_equal(
            labels, pipeline.shuffled_indices(places, 60, requested.run.seed)
        )


# ---- frozen variables


def test_a_frozen_variable_and_its_momentum_stay_as_they_are(four_cpus, caplog):
    builder = make_towers(
        line_model(),
        four_cpus[:2],
        optimizer=keras.optimizers.SGD(7.0, momentum=0.9, weight_decay=0.01),
        loss=squared_error,
    )
    batches = split(tf.constant([[1.0], [-2.0]]), tf.constant([0.0, 3.0]), 2)
    builder.step(batches)
    state = builder.state
    kernel, bias = state.model.trainable_variables
    momentum = state.optimizer.momentums[1]
    before, moved = bias.numpy(), momentum.numpy()
    assert moved.any()
    weight = kernel.numpy()
    builder.freeze(["dense/bias"])
    for step in range(2):
        assert [*builder.gradients(batches)] == [kernel.path]
        builder.step(batches)
        assert bias.numpy() == before
        assert momentum.numpy() == moved
        assert kernel.numpy() != weight
        weight = kernel.numpy()
        assert int(state.global_step) == 2 + step
    builder.freeze(())
    builder.step(batches)
    assert bias.numpy() != before
    assert not caplog.records


def test_the_gradient_of_a_frozen_layer_is_not_computed():
    """Nor that of what only it needs: the activation behind it."""
    state = build_state(None)
    tower = assembly.build_tower(config(None).loss)
    batch = tf.zeros([2, 32, 32, 3]), tf.zeros([2], tf.int32)

    def kinds(frozen):
        tower.frozen = frozen
        traced = tf.function(lambda *batch: tower(state, 0, *batch).gradients)
        graph = traced.get_concrete_function(*batch).graph.as_graph_def()
        nodes = [*graph.node]
        for function in graph.library.function:
            nodes += function.node_def
        return {node.op for node in nodes}

    assert {"Conv2DBackpropFilter", "TanhGrad"} <= kinds(())
    assert not {"Conv2DBackpropFilter", "TanhGrad"} & kinds(("first",))


def test_a_sectioned_tower_freezes_too():
    state = TrainState(small_model(), keras.optimizers.SGD())
    plain = towers.Tower(inference, loss)
    expected = plain(state, 0, *random_batch()).gradients
    sectioned = SectionedTower(plain, [])
    sectioned.frozen = ["dense/bias"]
    found = tf.function(lambda *batch: sectioned(state, 0, *batch).gradients)(
        *random_batch()
    )
    assert found[1] is None
    for place in (0, 2, 3):
        np.testing.assert_allclose(found[place], expected[place], atol=1e-6)


# ---- a whole run

# Of the same size, so that only a new trace freezes.
STAGES = [
    {"until": 0.5, "image_size": 24},
    {"image_size": 24, "frozen": ["first"]},
]


def whole(**options):
    return {
        "model": "pooled",
        "num_gpus": 1,
        "global_batch_size": 8,
        "distortions": "flip_translate",
        "precision": "float64",
        "schedule": "linear",
        "momentum": 0.9,
        "max_steps": 6,
        "log_frequency": 6,
        "summary_steps": 100,
        "stages": STAGES,
        **options,
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory, stand_in_dir):
    """The values in the end, and size, frozen variables and time of each trace."""
    noted, clocks = [], []
    compute = towers.Tower.__call__

    def traced(tower, state, number, inputs, *more):
        noted.append((inputs.shape[1], tuple(tower.frozen), clocks[-1].part == "start"))
        return compute(tower, state, number, inputs, *more)

    class Noted(loop.Timer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            clocks.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "pooled", Architecture(pooled))
        patch.setattr(towers.Tower, "__call__", traced)
        patch.setattr(loop, "Timer", Noted)
        values = runs.train(
            tmp_path_factory.mktemp("straight") / "run", stand_in_dir, **whole()
        )
    return values, noted


def test_each_stage_is_traced_at_its_start(straight):
    assert straight[1] == [(24, (), True), (24, ("first",), True)]


def test_two_towers_in_multi_step_calls_end_at_the_same_values(
    tmp_path, stand_in_dir, straight
):
    steps = []
    hook = types.SimpleNamespace(on_step=steps.append)
    options = whole(num_gpus=2, steps_per_call=2)
    with pytest.MonkeyPatch.context() as patch:
        hooked = functools.partial(training.train, hooks=[hook])
        patch.setattr(training, "train", hooked)
        together = runs.train(tmp_path / "two", stand_in_dir, **options)
    assert steps == [2, 3, 5, 6]
    for name, value in straight[0].items():
        np.testing.assert_allclose(together[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_of_a_stage(tmp_path, stand_in_dir, straight):
    run = tmp_path / "run"
    place = {"train_dir": str(run), "data": "synthetic", "data_dir": str(stand_in_dir)}
    stop = StopSignals()

    def after_step(step):
        if step == 4:
            stop.requested = signal.SIGTERM

    hook = types.SimpleNamespace(on_step=after_step)
    with pytest.raises(StoppedError, match="step 4"):
        training.train(Config(**whole(**place)), stop, hooks=[hook])
    runs.assert_equal(runs.train(run, stand_in_dir, **whole()), straight[0])

    other = whole(stages=[{"until": 0.2, "image_size": 20}, {}])
    with pytest.raises(UsageError, match="stages"):
        runs.train(run, stand_in_dir, **other)
    assert Config(resume=str(run)).update.stages == STAGES
