"""What has to hold on a GPU; `make test-all` shows it on logical devices of the CPU.

`python -m pytest -m gpu` runs the same tests on the first GPU, split into four.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.input import distortions, on_device, pipeline
from cifar10.sections import planning
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.towers import devices
from cifar10.towers.devices import Placement
from cifar10.towers.towers import TowerBuilder
from cifar10.training import assembly

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (50, 32, 32, 3), np.uint8)
LABELS = RANDOM.integers(0, 10, 50, np.int32)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def four(request, four_cpus, monkeypatch):
    """Four devices, which trainings of this process use."""
    if request.param == "gpu" and not tf.config.list_logical_devices("GPU"):
        pytest.skip("there is no GPU that TensorFlow can use")
    names = tuple(f"/{request.param}:{number}" for number in range(len(four_cpus)))

    def place(num_gpus, split_gpu=1):
        del split_gpu  # They are split for all tests of this process.
        return Placement(names[:num_gpus], num_gpus > 1, "towers of a test")

    monkeypatch.setattr(devices, "place_towers", place)
    return names


def train(directory, data_dir, towers=1, **options):
    """Trains from the start; returns the last checkpoint's variables."""
    keras.backend.clear_session(free_memory=False)
    defaults = {
        "num_gpus": towers,
        "batch_size": 32 // towers,
        "max_steps": 8,
        "checkpoint_steps": 8,
        "log_frequency": 4,
        "summary_steps": 100,
        "precision": "float64",
    }
    return runs.train(directory, data_dir, **{**defaults, **options})


def floats(values):
    """The variables that are numbers to compare, without those of one run."""
    return {
        name: value
        for name, value in values.items()
        if np.issubdtype(value.dtype, np.floating)
        and name.startswith(("model/", "averages/", "optimizer/"))
    }


def assert_close(values, expected, limit):
    assert floats(expected)
    assert runs.largest_difference(floats(values), floats(expected)) <= limit


@pytest.mark.usefixtures("four")
def test_four_towers_equal_one_in_float64(tmp_path, stand_in_dir):
    one = train(tmp_path / "one", stand_in_dir, checkpoint_steps=4)
    for update in ("towers", "mirrored"):
        options = {"towers": 4, "variable_update": update}
        assert_close(train(tmp_path / update, stand_in_dir, **options), one, 1e-8)
    # The comparison can fail.
    half = runs.variables(runs.checkpoint(tmp_path / "one", 4))
    assert runs.largest_difference(floats(half), floats(one)) > 1e-3


@pytest.mark.usefixtures("four")
def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path, stand_in_dir):
    """With batch statistics and dropout, bit for bit."""
    options = {
        "model": "small_runs:small",
        "towers": 2,
        "precision": "float32",
        "momentum": 0.9,
        "deterministic": True,
    }
    straight = train(tmp_path / "straight", stand_in_dir, **options)
    train(tmp_path / "resumed", stand_in_dir, **options, max_steps=5)
    resumed = train(tmp_path / "resumed", stand_in_dir, **options)
    runs.assert_equal(resumed, straight)


@pytest.mark.usefixtures("four")
def test_reduced_precision_trains_close_to_float32(tmp_path, stand_in_dir):
    full, *reduced = (
        train(tmp_path / precision, stand_in_dir, max_steps=4, precision=precision)
        for precision in ("float32", "bfloat16", "float16")
    )
    trained = [name for name in full if name.startswith("averages/")]
    assert len(trained) == 4
    for values in reduced:
        for name in trained:
            assert values[name].dtype == full[name].dtype
            difference = np.linalg.norm(values[name] - full[name])
            assert 0 < difference <= 0.1 * np.linalg.norm(full[name]) + 1e-3, name


def sectioned_step(device, cuts):
    """Runs a ResNet's step; returns its variables, and bytes predicted and measured."""
    keras.backend.clear_session(free_memory=False)
    placement = Placement((device,), False, "a tower of a test")
    # On an H100 cuDNN's workspaces hid what sections save with 64 images.
    count = 1024 if "gpu" in device else 64
    requested = Config(model="resnet", depth=3, batch_size=count, precision="float32")
    config = assembly.resolve_config(requested, placement)
    state = assembly.build_state(config, device, IMAGES.shape[1:], 10)
    shape = distortions.image_shape(config.images.distortions, IMAGES.shape[1:])
    planner = planning.Planner(
        state,
        assembly.build_tower(config.loss),
        (device,),
        tf.TensorSpec([count, *shape]),
    )
    plan = planner.choose(cuts)
    update = assembly.build_update(config, 50_000)
    tower = SectionedTower(planner.tower, plan.starts)
    step = TowerBuilder(state, (device,), tower=tower, update=update)
    with tf.device(device):
        images = tf.random.stateless_normal((count, *shape), (1, 2))
        batch = images, tf.range(count) % 10
    step.step([batch])  # Traced, and convolutions have chosen how they compute.
    measured = None
    if "gpu" in device:  # Only a GPU's allocator says what a step has taken.
        name = device.strip("/").upper()
        held = tf.config.experimental.get_memory_info(name)["current"]
        tf.config.experimental.reset_memory_stats(name)
        step.step([batch]).tower_losses.numpy()
        peak = tf.config.experimental.get_memory_info(name)["peak"]
        measured = peak - held
    variables = [variable.numpy() for variable in state.model.trainable_variables]
    return variables, plan.tower_bytes, measured


def test_sections_take_less_memory_for_the_same_update(four):
    whole, predicted, measured = sectioned_step(four[0], "1")
    values, less_predicted, less_measured = sectioned_step(four[0], "4")
    for value, expected in zip(values, whole, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-4)
    assert less_predicted < 0.8 * predicted
    if measured is not None:
        assert less_measured < 0.9 * measured


@pytest.mark.parametrize("distortion", ["tutorial", "flip_translate"])
def test_images_distorted_on_the_device_equal_the_images_of_the_host(four, distortion):
    source = IMAGES, LABELS, pipeline.BatchMaker(distortion, seed=5)
    order = {"batch_size": 8, "start_step": 11}
    expected = pipeline.training_batches(*source, towers=2, **order)
    made = on_device.device_batches(*source, devices=four[:2], **order)
    with pipeline.PrefetchQueues(made, four[:2]) as queues:
        for tower_batches in expected.take(3):
            for device, own, other in zip(
                four, queues.get(), tower_batches, strict=False
            ):
                assert own[0].device.lower().endswith(device.strip("/"))
                np.testing.assert_allclose(own[0], other[0], atol=1e-4)
                np.testing.assert_array_equal(own[1], other[1])


@pytest.mark.usefixtures("four")
def test_several_steps_with_xla_equal_single_steps(tmp_path, stand_in_dir):
    """Of a model without pooling, whose gradient XLA cannot make deterministic."""
    options = {"max_steps": 9, "checkpoint_steps": 9, "momentum": 0.9}
    single = train(tmp_path / "single", stand_in_dir, **options)
    options |= {"xla": True, "steps_per_call": 4}
    several = train(tmp_path / "several", stand_in_dir, **options)
    assert_close(several, single, 1e-5)


@pytest.mark.gpu
def test_the_program_splits_a_gpu(tmp_path, stand_in_dir):
    """In a process of its own, in the memory that this one leaves free."""
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("there is no GPU that TensorFlow can use")
    words = runs.training_flags(tmp_path / "run", stand_in_dir, max_steps=10)
    done = runs.run("train_multi_gpu.py", "--num_gpus", 4, "--split_gpu", 4, *words)
    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stdout
