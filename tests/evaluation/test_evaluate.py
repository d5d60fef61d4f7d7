"""Evaluation: exact for every batch size."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.evaluation import evaluate as evaluation
from cifar10.input.evaluation import evaluation_batches
from cifar10.scoring import scorer

COUNT, CLASSES = 37, 10
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (COUNT, 32, 32, 3), np.uint8)
LABELS = RANDOM.integers(0, CLASSES, COUNT).astype(np.int32)


def make_model():
    """A small model with dropout, and batch statistics unlike those of any batch."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            keras.layers.Conv2D(4, 5, strides=4, activation="relu"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(0.5)),
        ]
    )
    model.get_layer("norm").moving_mean.assign([0.5, -0.5, 1.0, 0.0])
    model.get_layer("norm").moving_variance.assign([2.0, 0.5, 1.0, 3.0])
    return model


@pytest.fixture(scope="module")
def model():
    """One model for all tests; they must not change it."""
    return make_model()


def expected_scores(logits, labels):
    """Computes all sums with numpy from logits, [count, classes]."""
    classes = logits.shape[1]
    logits = logits.astype(np.float64)
    log_sums = np.log(np.sum(np.exp(logits), axis=1))
    confusion = np.zeros((classes, classes), int)
    ranks = np.zeros(classes, int)
    for row, label in zip(logits, labels, strict=True):
        confusion[label, np.argmax(row)] += 1
        ranks[np.argsort(row)[::-1].tolist().index(label)] += 1
    cross_entropy = np.sum(log_sums - logits[np.arange(len(labels)), labels])
    return cross_entropy, ranks, confusion


def logits_of(model, images):
    """Calls the model on all images at once, prepared one by one by tf.image."""
    crops = [tf.image.per_image_standardization(image[4:28, 4:28]) for image in images]
    return model(tf.stack(crops), training=False).numpy()


def evaluate(model, device, *, batch_size=16, trainable=None, count=COUNT):
    return scorer.Scorer(model, CLASSES).score(
        [variable.value for variable in model.trainable_variables]
        if trainable is None
        else trainable,
        evaluation_batches(IMAGES[:count], LABELS[:count], batch_size),
        device,
    )


@pytest.mark.parametrize("batch_size", [1, 7, 16, 37, 64])
def test_every_image_counts_once(model, four_cpus, batch_size):
    sums, weight_decay = evaluate(model, four_cpus[1], batch_size=batch_size)
    cross_entropy, ranks, confusion = expected_scores(logits_of(model, IMAGES), LABELS)
    assert sums.count == COUNT
    np.testing.assert_array_equal(sums.confusion, confusion)
    np.testing.assert_array_equal(sums.ranks, ranks)
    assert sums.cross_entropy == pytest.approx(cross_entropy, rel=1e-6)
    kernel = model.layers[-1].kernel.numpy()
    assert weight_decay == pytest.approx(0.5 * np.sum(kernel**2), rel=1e-5)


def test_what_became_of_each_image_is_told_once_and_in_order(model, four_cpus):
    batches = []
    sums, _ = scorer.Scorer(model, CLASSES).score(
        [variable.value for variable in model.trainable_variables],
        evaluation_batches(IMAGES, LABELS, 16),
        four_cpus[0],
        batches.append,
    )
    logits = logits_of(model, IMAGES).astype(np.float64)
    part = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    losses = np.concatenate([batch.cross_entropy for batch in batches])
    np.testing.assert_allclose(
        losses, -np.log(part[np.arange(COUNT), LABELS]), rtol=1e-4, atol=1e-6
    )
    assert losses.sum() == pytest.approx(sums.cross_entropy)
    predictions = np.concatenate([batch.predictions for batch in batches])
    np.testing.assert_array_equal(predictions, logits.argmax(axis=1))
    confidence = np.concatenate([batch.confidence for batch in batches])
    np.testing.assert_allclose(confidence, part.max(axis=1), rtol=1e-4)


def test_a_part_of_the_set_is_its_first_images(model, four_cpus):
    sums, _ = evaluate(model, four_cpus[0], count=20)
    _, ranks, confusion = expected_scores(logits_of(model, IMAGES[:20]), LABELS[:20])
    np.testing.assert_array_equal(sums.confusion, confusion)
    np.testing.assert_array_equal(sums.ranks, ranks)


def test_the_values_given_are_scored_and_not_the_models_own(model, four_cpus):
    own = [variable.numpy() for variable in model.variables]
    random = np.random.default_rng(4)
    averages = [
        tf.Variable(random.normal(size=variable.shape).astype(np.float32) * 0.3)
        for variable in model.trainable_variables
    ]
    sums, weight_decay = evaluate(model, four_cpus[0], trainable=averages)
    for variable, value in zip(model.variables, own, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)

    averaged = make_model()
    for variable, value in zip(averaged.trainable_variables, averages, strict=True):
        variable.assign(value)
    cross_entropy, ranks, confusion = expected_scores(
        logits_of(averaged, IMAGES), LABELS
    )
    np.testing.assert_array_equal(sums.confusion, confusion)
    np.testing.assert_array_equal(sums.ranks, ranks)
    assert sums.cross_entropy == pytest.approx(cross_entropy, rel=1e-6)
    assert weight_decay == pytest.approx(0.5 * np.sum(averages[-2].numpy() ** 2))


def test_few_classes_and_no_penalties(four_cpus):
    """With three classes every image is correct at five, and nothing decays."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((24, 24, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    labels = LABELS % 3
    sums, weight_decay = scorer.Scorer(model, 3).score(
        model.trainable_variables,
        evaluation_batches(IMAGES, labels, 16),
        four_cpus[0],
    )
    cross_entropy, _, confusion = expected_scores(logits_of(model, IMAGES), labels)
    np.testing.assert_array_equal(sums.confusion, confusion)
    assert sums.cross_entropy == pytest.approx(cross_entropy, rel=1e-6)
    assert (sums.correct_among(5), weight_decay) == (COUNT, 0.0)


def test_ranks_are_those_of_in_top_k():
    """With ties at every limit, and logits that are not finite."""
    random = np.random.default_rng(3)
    logits = random.integers(0, 4, (200, 6)).astype(np.float32)
    logits[0, 2], logits[1, 5], logits[2] = np.nan, np.inf, -np.inf
    labels = random.integers(0, 6, 200).astype(np.int32)
    mask = random.random(200) < 0.8
    ranks = scorer._ranks(*map(tf.constant, (logits, labels, mask))).numpy()
    for k in range(1, 7):
        among = tf.math.in_top_k(labels, logits, k).numpy()
        among[:3] = False  # It looks at some of the other logits only.
        assert ranks[:k].sum() == np.count_nonzero(among & mask)


def test_float64_is_kept(four_cpus):
    model = keras.Sequential(
        [
            keras.Input((24, 24, 3), dtype="float64"),
            keras.layers.Flatten(dtype="float64"),
            keras.layers.Dense(CLASSES, dtype="float64"),
        ]
    )
    batches = evaluation_batches(IMAGES, LABELS, 16)
    sums, _ = scorer.Scorer(model, CLASSES).score(
        model.trainable_variables, batches, four_cpus[0]
    )
    crops = np.concatenate([images[mask] for images, _, mask in batches])
    kernel, bias = (variable.numpy() for variable in model.trainable_variables)
    logits = crops.reshape(COUNT, -1).astype(np.float64) @ kernel + bias
    expected, _, _ = expected_scores(logits, LABELS)
    assert sums.cross_entropy == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_examples", 0),
        ("num_examples", -1),
        ("batch_size", 0),
        ("batch_size", -3),
        ("eval_interval_secs", -1.0),
        ("eval_interval_secs", 0.0),
        ("eval_interval_secs", float("nan")),
        ("step", "15.5"),
        ("step", "-1"),
        ("step", "last"),
        ("top_k", "0"),
        ("top_k", "3,"),
        ("top_k", "3, 5"),
        ("top_k", "9" * 5000),
    ],
)
def test_options_that_make_no_sense_are_named(field, value):
    with pytest.raises(UsageError, match=f"--{field} {value}"):
        evaluation.Options("run", **{field: value})


def test_options_allow_the_least_and_everything():
    options = evaluation.Options("run", batch_size=1, num_examples=1, top_k="3,10")
    assert options.ks == [3, 10]
    assert (options.batch_size, options.num_examples) == (1, 1)
    assert evaluation.Options("run").num_examples is None


def test_six_views_weigh_as_airbench_weighs_them(four_cpus):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((24, 24, 3)), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    )
    batches = evaluation_batches(IMAGES, LABELS, 16)
    images = np.concatenate([images[mask] for images, _, mask in batches])
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")

    def both(seen):
        return (model(seen).numpy() + model(seen[:, :, ::-1]).numpy()) / 2

    moved = (both(padded[:, 2:, 2:]) + both(padded[:, :-2, :-2])) / 2
    expected, _, confusion = expected_scores((both(images) + moved) / 2, LABELS)
    sums, _ = scorer.Scorer(model, CLASSES, test_time_augmentation=True).score(
        model.trainable_variables, batches, four_cpus[0]
    )
    assert sums.cross_entropy == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(sums.confusion, confusion)
