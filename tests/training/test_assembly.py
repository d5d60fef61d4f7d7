"""What the flags say reaches the parts of a run that it is for."""

import contextlib
import dataclasses
import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
import small_model
from cifar10.config.config import Config
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.workers import Workers
from cifar10.errors import UsageError
from cifar10.input import pipeline
from cifar10.model import loss
from cifar10.towers import devices
from cifar10.towers.devices import Placement
from cifar10.towers.update import Averages, TrainState
from cifar10.training import assembly, compiling
from cifar10.training.tensorboard import activations_of
from small_towers import open_batches

TWO_TOWERS = Placement(("/cpu:0", "/cpu:1"), simulated=True, description="two towers")


def resolved(*, workers=1, **flags):
    flags = {"batch_size": 5, "precision": "float32", **flags}
    return assembly.resolve_config(
        Config.from_values(flags), TWO_TOWERS, workers=workers
    )


def test_the_global_batch_counts_all_towers_and_workers():
    assert resolved(workers=3, accumulate=2).global_batch_size == 60
    assert resolved(workers=3, global_batch_size=42).batch.batch_size == 7


def build_state(**flags):
    config = resolved(model=runs.SMALL, **flags)
    return assembly.build_state(config, "/cpu:0", (32, 32, 3), 10)


def test_the_seed_decides_the_initial_values():
    first, same, other = (
        build_state(seed=seed).model.trainable_variables[0].numpy()
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_state_is_on_its_device_with_the_scalars_of_its_optimizer(precision):
    """A step would otherwise copy each of them."""
    config = resolved(model=runs.SMALL, precision=precision, optimizer="adamw")
    state = assembly.build_state(config, "/cpu:1", (32, 32, 3), 10)
    assert {one.device[-5:] for one in state.variables()} == {"CPU:1"}


def one_weight():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", {0: 0.2, 1: 0.39, 3: 0.74, 4: 0.72, 20: 0.4, 39: 0.02}),
        ("cosine", {4: 0.780423, 20: 0.4, 30: 0.1171573}),
        ("staircase", {1: 0.4, 9: 0.8, 10: 0.08, 25: 0.008}),
    ],
)
def test_the_update_has_the_rates_and_the_limit_of_the_flags(schedule, rates):
    """40 steps of 10 images are 4 epochs of 100 images."""
    config = resolved(
        max_steps=40,
        learning_rate=0.8,
        schedule=schedule,
        epochs_per_decay=1.0,
        warmup_epochs=0.4,
        clip_norm=3.0,
        moving_average_decay=0.0,
    )
    update = assembly.build_update(config, 100)
    state = TrainState(one_weight(), keras.optimizers.SGD())
    averages = Averages([tf.constant([[12.0]])], [None], {}, tf.zeros(2), 10)
    (kernel,) = state.model.trainable_variables
    for step, rate in rates.items():
        state.global_step.assign(step)
        kernel.assign([[0.0]])
        metrics = update(state, averages)
        assert float(metrics["learning_rate"]) == pytest.approx(rate)
        assert kernel.numpy().item() == pytest.approx(-rate * 3.0)
        assert state.averages[0].numpy().item() == pytest.approx(-rate * 3.0)


@pytest.mark.parametrize(
    ("on_nan", "step"), [("stop", 0), ("rollback", 0), ("skip", 2)]
)
def test_only_skip_lets_steps_write_after_a_bad_step(on_nan, step):
    """Else what is saved to be looked into is no longer what the bad step met."""
    update = assembly.build_update(resolved(on_nan=on_nan, max_steps=9), 100)
    state = TrainState(one_weight(), keras.optimizers.SGD())
    (kernel,) = state.model.trainable_variables
    before = kernel.numpy()
    for gradient in (np.inf, 1.0):
        averages = Averages([tf.constant([[gradient]])], [None], {}, tf.zeros(2), 10)
        update(state, averages)
    assert int(state.global_step) == step
    assert (kernel.numpy() != before).any() == (on_nan == "skip")


def test_a_deterministic_run_keeps_all_cores(tmp_path, stand_in_dir, monkeypatch):
    """Other numbers of towers would otherwise have other threads, and rounding."""
    divided = []
    monkeypatch.setattr(devices, "divide_cores", divided.append)
    for deterministic in (True, False):
        assembly.assemble(
            Config(
                num_gpus=2,
                batch_size=4,
                model=runs.SMALL,
                deterministic=deterministic,
                data="synthetic",
                data_dir=str(stand_in_dir),
                train_dir=str(tmp_path / "run"),
            )
        )
    assert divided == [2]


def test_a_run_records_as_many_cores_as_an_operation_uses(
    tmp_path, stand_in_dir, monkeypatch
):
    """How sums round depends on them."""
    config = Config(
        num_gpus=1,
        batch_size=4,
        model=runs.SMALL,
        data="synthetic",
        data_dir=str(stand_in_dir),
        train_dir=str(tmp_path / "run"),
    )
    training = assembly.assemble(config)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for given, cores in (("", 8), ("0", 8), ("many", 8), ("4", 4)):
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", given)
        versions = dataclasses.replace(training).run.facts.versions
        assert versions["processor"].endswith(f", {cores} cores")


def test_the_optimizer_has_the_momentum_and_the_arguments_of_the_recipe():
    assert build_state(momentum=0.7).optimizer.momentum == 0.7
    arguments = {"weight_decay": 0.05, "beta_2": 0.99}
    state = build_state(optimizer="adamw", optimizer_arguments=arguments)
    assert type(state.optimizer) is keras.optimizers.AdamW
    assert (state.optimizer.weight_decay, state.optimizer.beta_2) == (0.05, 0.99)
    # No gradient: what changes is the decay, which biases do not have.
    variables = state.model.trainable_variables
    for variable in variables:
        variable.assign(tf.ones_like(variable))
    state.optimizer.apply([tf.zeros_like(variable) for variable in variables])
    assert [variable.numpy().max() < 1.0 for variable in variables] == [True, False] * 2


def test_the_flag_decides_the_smoothing_of_labels():
    batch = tf.constant([[1.0, 2.0, 4.0]]), tf.constant([0])
    tower = assembly.build_tower(resolved(label_smoothing=0.3).loss)
    expected = loss(*batch, [], label_smoothing=0.3)["total_loss"]
    assert float(tower.loss(*batch, [])["total_loss"]) == float(expected)
    assert float(expected) != float(loss(*batch, [])["total_loss"])


def test_towers_are_numbered_across_workers():
    strategy = types.SimpleNamespace(num_replicas_in_sync=3)
    cluster = Cluster(("0:1", "1:1", "2:1"), 2)
    towers, *_ = assembly.build_towers(
        resolved(model=runs.SMALL, workers=3),
        TWO_TOWERS,
        [build_state()],
        strategy,
        Workers(cluster),
        np.zeros((100, 32, 32, 3), np.uint8),
        classes=10,
    )
    assert (towers.first_tower, towers.num_towers) == (4, 6)
    assert towers.tower_names[4] == "/cpu:0 of worker 2"


def test_mirrored_variables_are_on_the_device_of_each_tower(four_cpus):
    placement = Placement(tuple(four_cpus[:2]), simulated=True, description="")
    config = assembly.resolve_config(
        Config(model=runs.SMALL, batch_size=4, variable_update="mirrored"), placement
    )
    parts = (32, 32, 3), 10
    states = [assembly.build_state(config, one, *parts) for one in placement.devices]
    images = np.zeros((100, 32, 32, 3), np.uint8)
    given = config, placement, states, None, Workers(), images
    towers, *_ = assembly.build_towers(*given, classes=10)
    assert tuple(state.device for state in towers.states) == placement.devices


def test_no_program_of_several_steps_is_tried_where_each_step_is_a_call(monkeypatch):
    def note_steps(*given):
        tried.append(given[-1])
        return {}

    def no_batches(*_):
        return contextlib.nullcontext(types.SimpleNamespace(get=list))

    tried = []
    monkeypatch.setattr(compiling, "try_programs", note_steps)
    monkeypatch.setattr(assembly.Training, "open_batches", no_batches)
    nothing = {one.name: None for one in dataclasses.fields(assembly.Training)}
    for flags, sections in (
        ({}, None),
        ({"verify_steps": 5}, None),
        ({}, "2 sections"),
    ):
        config = resolved(steps_per_call=7, **flags)
        parts = {
            "config": config,
            "sections": sections,
            "images": np.zeros((1, 8, 8, 3)),
        }
        assembly.Training(**{**nothing, **parts}).try_xla()
    assert tried == [7, 1, 1]


def test_the_input_follows_the_flags_and_the_workers_index():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (50, 32, 32, 3), np.uint8)
    numbers = np.arange(50, dtype=np.int32)
    cluster = Cluster(("a:1", "b:1"), 1)
    expected = pipeline.training_batches(
        images,
        numbers,
        pipeline.BatchMaker("crop_flip", seed=7),
        batch_size=5,
        towers=4,
        start_step=6,
        worker=(1, 2),
    )
    config = resolved(workers=2, accumulate=2, distortions="crop_flip", seed=7)
    together = Workers(cluster)
    opened = open_batches(config, TWO_TOWERS, together, images, numbers, 6, 6)
    with opened as queues:
        for batches in expected.take(2):
            for ours, theirs in zip(queues.get(), batches, strict=True):
                np.testing.assert_array_equal(ours[1], theirs[1])
                np.testing.assert_array_equal(ours[0], theirs[0])


def test_an_odd_batch_cannot_be_mixed():
    for flags in ({"batch_size": 5}, {"batch_size": 6, "global_batch_size": 10}):
        with pytest.raises(UsageError, match="--batch_size 5"):
            resolved(augmentation={"cutmix": {}}, **flags)


def test_a_call_of_several_steps_ends_with_its_stage():
    stages = [{"until": 0.5, "frozen": ["conv1"]}, {}]
    periods = dict.fromkeys(("log_frequency", "summary_steps", "checkpoint_steps"), 10)
    options = {"stages": stages, "schedule": "linear", "max_steps": 10, **periods}
    config = resolved(steps_per_call=2, **options)
    assert calls(config) == [2, 2, 1, 2, 2, 1]


def test_calls_end_at_summaries_checkpoints_and_verified_steps():
    """Steps within a call can be logged; a verified step is a call of its own."""
    periods = {"summary_steps": 7, "checkpoint_steps": 10, "max_steps": 12}
    config = resolved(steps_per_call=5, log_frequency=1, **periods)
    assert calls(config) == [5, 2, 3, 2]
    config = resolved(steps_per_call=5, verify_steps=4, **periods)
    assert calls(config) == [3, 1, 3, 1, 2, 1, 1]


def calls(config):
    """Returns the number of steps of each call of a run."""
    counts = []
    while (step := sum(counts)) < config.run.max_steps:
        # Of one stage.
        counts += config.calls(step, config.speed.steps_per_call)
    return counts


def test_gpus_take_several_steps_per_call_as_memory_allows():
    one = Placement(("/gpu:0",), simulated=False, description="a GPU")
    two = Placement(("/gpu:0", "/gpu:1"), simulated=False, description="two GPUs")

    def count(shape=(32, 32, 3), gpus=two, **flags):
        flags = {"batch_size": 128, "precision": "float32", **flags}
        parts = {one.name: None for one in dataclasses.fields(assembly.Training)}
        parts["config"] = assembly.resolve_config(Config.from_values(flags), gpus)
        parts["images"] = np.broadcast_to(np.uint8(0), (50_000, *shape))
        return assembly.Training(**parts | {"placement": gpus}).steps_per_call

    assert count() == 10
    assert count(log_frequency=15, eval_steps=35) == 10
    large = {"shape": (128, 128, 3), "distortions": "flip_translate"}
    assert count(**large) == 5  # Of 24 MiB each.
    assert count(**large, batch_size=1024) == 1
    assert count(sections="2") == count(xla=True) == 1
    assert count(xla=True, gpus=one) == 50
    assert assembly.default_steps_per_call(resolved(), TWO_TOWERS, (32, 32, 3)) == 1


def test_layers_taken_from_another_model_show_no_activations():
    """As where the end of a model is replaced by `Sequential([input, *its_layers])`."""
    first = small_model.two_layers((24, 24, 3), 10)
    image, added = keras.Input((24, 24, 3)), keras.layers.ReLU(name="added")
    model = keras.Sequential([image, *first.layers[1:], added])
    shown = activations_of(model, "/cpu:0")(tf.ones([2, 24, 24, 3]))
    assert shown == {}


def test_a_verified_step_beyond_the_epochs_is_refused():
    given = Config(
        batch_size=5,
        precision="float32",
        max_epochs=1,
        verify_steps=11,
        recipe="tutorial",
    )
    config = assembly.resolve_config(given, TWO_TOWERS)
    with pytest.raises(UsageError, match=r"--verify_steps 11: .*max_steps 10"):
        assembly.complete_config(config, None, 100)
    assert assembly.complete_config(config, None, 110).run.max_steps == 11
    # Earlier versions accepted it of a run, which is replayed without the flag.
    config.given = frozenset()
    assert assembly.complete_config(config, None, 100).run.max_steps == 10


def test_more_towers_than_images_are_refused():
    config = resolved(batch_size=1, accumulate=4)
    with pytest.raises(UsageError, match="Give fewer towers"):
        assembly.check_epoch(config, 3)
    with pytest.raises(UsageError, match="at most --batch_size 1"):
        assembly.check_epoch(resolved(batch_size=3, accumulate=4), 9)
