"""The tutorial on one page computes what the package computes."""

import importlib.util
import os
import re

import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.input import pipeline, records, synthetic
from cifar10.training import train as training

PAGE = runs.ROOT / "examples" / "one_page.py"
TOWERS, BATCH_SIZE, STEPS = 4, 4, 50
# The rate falls after 400 of the 800 images.
EPOCHS_PER_DECAY = 0.04


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
    return models.build(
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


def test_it_fits_on_a_page_and_needs_nothing_else():
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 200
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported == {"argparse", "os", "time", "pathlib", "numpy", "tensorflow"}


@pytest.mark.slow
def test_steps_end_where_those_of_the_package_end(
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
    batches_of = {"batch_size": BATCH_SIZE, "towers": TOWERS, "distortion": "tutorial"}
    queue = iter(
        pipeline.training_batches(images, labels, **batches_of, seed=0, start_step=0)
    )
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


# Rises by one a column and by nine a row, beside a black and a white channel: of what
# was done to it nothing is lost.
RULER = np.zeros((32, 32, 3), np.float32)
RULER[:, :, 0] = np.arange(32)[None, :] + 9.0 * np.arange(32)[:, None]
RULER[:, :, 2] = 255.0


def measured(image):
    """Returns from which row and column, whether mirrored, and with what contrast."""
    image = np.asarray(image, np.float64)
    assert image.shape == (24, 24, 3)
    ruler, black, white = image.mean(axis=(0, 1))
    scale = 255.0 / (white - black)
    columns = np.diff(image[:, :, 0], axis=1).mean() * scale
    centre = (ruler - black) * scale
    row, column = divmod(round(centre - 10 * 11.5), 9)
    return row, column, columns < 0, abs(columns)


def test_it_distorts_as_the_package_does(page):
    tf.random.set_seed(0)
    count = 250
    distorted = pipeline.distort(
        tf.repeat(RULER[None], count, axis=0), "tutorial", tf.constant([0, 0], tf.int64)
    )
    ours = [measured(page.distort(RULER)) for _ in range(count)]
    for rows, columns, mirrored, contrasts in (
        zip(*ours, strict=True),
        zip(*map(measured, distorted), strict=True),
    ):
        assert {*rows} == {*columns} == {*range(9)}
        assert np.mean(mirrored) == pytest.approx(0.5, abs=0.15)
        assert 0.2 <= min(contrasts) < 0.3
        assert 1.7 < max(contrasts) <= 1.8


@pytest.mark.slow
def test_it_trains_goes_on_and_scores(tmp_path, page, stand_in_dir, stand_in):
    words = [PAGE, "--train_dir", tmp_path, "--data_dir", stand_in_dir]

    def run(*more):
        done = runs.run(*words, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("--max_steps", 1)
    assert run("--num_gpus", 2, "--max_steps", 2).startswith("From step 1,")
    line = re.fullmatch(r"step (\d+): precision @ 1 = ([\d.]+)\n", run("--eval"))
    assert line[1] == "2"

    tf.random.set_seed(0)
    saved = page.Training()
    newest = tf.train.latest_checkpoint(os.fspath(tmp_path))
    tf.train.Checkpoint(training=saved).restore(newest).expect_partial()
    model = tutorial("float32")
    averages = {
        f"{layer}/{name}": value
        for layer, values in saved.averages.items()
        for name, value in zip(("kernel", "bias"), values, strict=True)
    }
    for variable in model.trainable_variables:
        variable.assign(averages[variable.path])
    images, labels = records.read_split(stand_in, synthetic.FORMAT, "test")
    logits = model(pipeline.prepare(images, "tutorial"))
    score = np.mean(np.argmax(logits, axis=1) == labels)
    assert float(line[2]) == pytest.approx(score, abs=1.1e-3)
