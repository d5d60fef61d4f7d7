"""The tutorial on one page computes what the package computes."""

import importlib.util
import re

import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.input import pipeline, synthetic
from cifar10.models.registry import build_model
from cifar10.training import train as training

PAGE = runs.ROOT / "examples" / "one_page.py"
TOWERS, BATCH_SIZE, STEPS = 4, 2, 50
# The rate falls after 200 of the 400 images.
EPOCHS_PER_DECAY = 0.02


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location("one_page", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in(stand_in_dir):
    return stand_in_dir / synthetic.FOLDER


def tutorial(precision):
    """Returns the package's model with its initial values."""
    return build_model(
        "tutorial", (24, 24, 3), 10, precision=precision, seed=0, device="/cpu:0"
    )


def assign(variables, values):
    for variable, value in zip(tf.nest.flatten(variables), values, strict=True):
        variable.assign(value)


def by_layer(page, model, values):
    """Returns values of a model's variables in the order in which the page has them."""
    names = [variable.path for variable in model.trainable_variables]
    found = dict(zip(names, values, strict=True))
    return tf.nest.flatten(
        {
            layer: [found[f"{layer}/kernel"], found[f"{layer}/bias"]]
            for layer in page.LAYERS
        }
    )


@pytest.mark.slow
def test_the_one_page_program_matches_the_steps_of_the_package(
    tmp_path, page, stand_in, stand_in_dir, monkeypatch
):
    config = Config(
        train_dir=str(tmp_path),
        data="synthetic",
        data_dir=str(stand_in_dir),
        num_gpus=TOWERS,
        batch_size=BATCH_SIZE,
        max_steps=STEPS,
        epochs_per_decay=EPOCHS_PER_DECAY,
        precision="float64",
        deterministic=True,
        log_frequency=1,
    )
    assert training.train(config) == STEPS
    model = tutorial("float64")
    initial = by_layer(page, model, [v.numpy() for v in model.trainable_variables])
    averages = [tf.Variable(v.value) for v in model.trainable_variables]
    checkpoint = tf.train.Checkpoint(model=model, averages=averages)
    path = str(runs.checkpoint(tmp_path, STEPS) / "state")
    checkpoint.restore(path).expect_partial()

    # Keras's optimizers hold the rate in float32, whatever the variables are.
    first, second = (float(np.float32(rate)) for rate in (0.1, 0.01))
    rate, factor = page.INITIAL_LEARNING_RATE, page.LEARNING_RATE_DECAY_FACTOR
    assert [rate, rate * factor] == pytest.approx([first, second])
    monkeypatch.setattr(page, "EPOCHS_PER_DECAY", EPOCHS_PER_DECAY)
    monkeypatch.setattr(page, "INITIAL_LEARNING_RATE", first)
    monkeypatch.setattr(page, "LEARNING_RATE_DECAY_FACTOR", second / first)
    images, labels = page.read_records(stand_in, page.TRAIN_FILES)
    monkeypatch.setattr(page, "EXAMPLES_PER_EPOCH", len(images))
    tf.random.set_seed(0)
    one_page = page.Training([f"/cpu:{tower}" for tower in range(TOWERS)], tf.float64)
    assign(one_page.parameters, initial)
    assign(one_page.averages, initial)
    maker = pipeline.BatchMaker("tutorial", seed=0)
    batches_of = {"batch_size": BATCH_SIZE, "towers": TOWERS, "start_step": 0}
    queue = iter(pipeline.training_batches(images, labels, maker, **batches_of))
    losses = []
    for _ in range(STEPS):
        batches = [(tf.cast(x, tf.float64), y) for x, y in next(queue)]
        losses.append(float(one_page.step(batches)))

    logged = [line["total_loss"] for line in runs.logged(tmp_path)]
    assert losses == pytest.approx(logged, rel=1e-10)
    for ours, theirs in (
        (one_page.parameters, [v.numpy() for v in model.trainable_variables]),
        (one_page.averages, [v.numpy() for v in averages]),
    ):
        flat = zip(tf.nest.flatten(ours), by_layer(page, model, theirs), strict=True)
        for (value, expected), start in zip(flat, initial, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)
            assert np.abs(expected - start).max() > 1e-4, "it was trained"


@pytest.mark.slow
def test_the_one_page_program_trains_resumes_and_scores(tmp_path, stand_in_dir):
    words = [PAGE, "--train_dir", tmp_path, "--data_dir", stand_in_dir]

    def run(*more):
        done = runs.run(*words, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("--max_steps", 1)
    assert run("--num_gpus", 2, "--max_steps", 2).startswith("From step 1,")
    (score,) = re.findall(r"^step 2: precision @ 1 = (0\.\d+)\n", run("--eval"))
    assert 0.0 < float(score) < 1.0
